//! Whatever a command or an orchestrator says over the control socket is a request, or is refused; a request is written as it is read.

#[path = "../../crates/cli/src/request.rs"]
#[allow(dead_code, reason = "what is answered is not read from outside")]
mod request;

use request::Request;

/// Holds one input to it.
pub fn check(line: &[u8]) {
    match Request::parse(line) {
        Ok(request) => {
            let again = serde_json::to_vec(&request).unwrap();
            assert!(!again.contains(&b'\n'));
            assert_eq!(Request::parse(&again), Ok(request));
        }
        Err(why) => assert!(why.starts_with("not a request: "), "{why:?}"),
    }
}
