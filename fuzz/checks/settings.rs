//! A setting is understood or refused in one clear line that changes nothing, and what is understood has one name.

use spillway_core::policy::Settings;

/// Holds one input to it: settings, a line each.
pub fn check(text: &str) {
    let mut settings = Settings::default();
    for line in text.split('\n') {
        let before = settings;
        match settings.set(line) {
            Ok(()) => {
                let Settings { policy, evict, scope, block } = settings;
                let named = [
                    format!("policy={}", policy.name()),
                    format!("evict={}", evict.name()),
                    format!("scope={}", scope.name()),
                    format!("block={}", block.name()),
                ];
                assert!(named.iter().any(|name| name == line), "{line:?} set {named:?}");
            }
            Err(error) => {
                assert_eq!(settings, before);
                let line = error.to_string();
                assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
            }
        }
    }
}
