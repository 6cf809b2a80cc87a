//! `spillway bench`
mod content;
mod figures;
mod order;
mod sys;
pub(crate) mod walk;
