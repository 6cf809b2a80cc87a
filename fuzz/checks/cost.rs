//! A description of systems is compared, with figures that make sense, or refused in one line.

use spillway_study::cost::compare;

/// Holds one input to it.
pub fn check(text: &str) {
    match compare(text) {
        Ok(compared) => {
            for system in compared.iter().flat_map(|each| &each.systems) {
                assert!(system.total > 0.0 && system.hardware >= 0.0 && system.operation >= 0.0, "{system:?}");
                assert!(system.performance_per_1000.is_finite() && system.to_baseline > 0.0, "{system:?}");
                assert!(!system.name.contains(char::is_control));
            }
            assert!(!compared.is_empty());
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
        }
    }
}
