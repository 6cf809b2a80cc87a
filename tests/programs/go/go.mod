module spillway.test/churn

go 1.19
