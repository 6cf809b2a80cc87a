//! The few calls of etcd that are needed, through its JSON gateway (etcd 3.4 and newer: `/v3/...`; keys and values in
//! base64, 64-bit numbers as strings).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::error::Error;
use crate::host::Host;

/// How long an endpoint may take for an answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// The longest answer: a few hundred bytes for each of 255 servers, and room.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// See the module's documentation.
pub(crate) struct Etcd {
    /// `host:port` each.
    endpoints: Vec<String>,
    /// Which one answered last: it is asked first, as one that is cut off costs all of [`PATIENCE`] each time.
    first: AtomicUsize,
    agent: ureq::Agent,
}

impl Etcd {
    pub(crate) fn new(endpoints: &[Host]) -> Self {
        let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).proxy(None).build();
        let endpoints = endpoints.iter().map(Host::to_string).collect();
        Self { endpoints, first: AtomicUsize::new(0), agent: config.into() }
    }

    /// The values of all keys that start with `prefix`.
    pub(crate) fn list(&self, prefix: &str) -> Result<Vec<Vec<u8>>, Error> {
        let ask = json!({ "key": BASE64.encode(prefix), "range_end": BASE64.encode(behind(prefix)) });
        self.call("kv/range", &ask, |answer| {
            let Some(entries) = answer.get("kvs") else { return Some(Vec::new()) };
            // An empty value is left out.
            let text = |entry: &Value| entry.get("value").and_then(Value::as_str).unwrap_or_default().to_owned();
            let value = |entry: &Value| BASE64.decode(text(entry)).ok();
            entries.as_array()?.iter().map(value).collect()
        })
    }

    /// A lease of so many seconds.
    pub(crate) fn grant(&self, seconds: u64) -> Result<Lease, Error> {
        self.call("lease/grant", &json!({ "TTL": seconds.to_string() }), |answer| {
            answer.get("ID")?.as_str().map(|id| Lease(id.to_owned()))
        })
    }

    /// Makes a lease last; false when it has ended.
    pub(crate) fn keep_alive(&self, lease: &Lease) -> Result<bool, Error> {
        self.call("lease/keepalive", &json!({ "ID": lease.0 }), |answer| {
            let seconds = answer.get("result")?.get("TTL").and_then(Value::as_str).unwrap_or("0");
            Some(seconds != "0")
        })
    }

    /// Sets a key for as long as the lease lasts.
    pub(crate) fn put(&self, key: &str, value: &str, lease: &Lease) -> Result<(), Error> {
        let ask = json!({ "key": BASE64.encode(key), "value": BASE64.encode(value), "lease": lease.0 });
        self.call("kv/put", &ask, |answer| answer.get("header").map(|_| ()))
    }

    /// Ends a lease, and the keys that it keeps.
    pub(crate) fn revoke(&self, lease: &Lease) -> Result<(), Error> {
        self.call("lease/revoke", &json!({ "ID": lease.0 }), |_| Some(()))
    }

    /// Asks one endpoint after the other until one has answered, and begins with that one the next time.
    fn call<T>(&self, what: &str, ask: &Value, read: impl Fn(&Value) -> Option<T>) -> Result<T, Error> {
        let mut failure = None;
        let first = self.first.load(Ordering::Relaxed);
        for at in (first..self.endpoints.len()).chain(0..first) {
            let endpoint = &self.endpoints[at];
            match self.ask(endpoint, what, ask) {
                Ok(answer) => {
                    self.first.store(at, Ordering::Relaxed);
                    return read(&answer).ok_or_else(|| Error::Protocol { endpoint: endpoint.clone() });
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.expect("a cluster has endpoints"))
    }

    fn ask(&self, endpoint: &str, what: &str, ask: &Value) -> Result<Value, Error> {
        let url = format!("http://{endpoint}/v3/{what}");
        let sent = self.agent.post(&url).content_type("application/json").send(ask.to_string());
        let mut answer = sent.map_err(|error| match error {
            ureq::Error::StatusCode(404 | 405) => Error::Protocol { endpoint: endpoint.into() },
            error => Error::Unreachable { endpoint: endpoint.into(), why: one_line(&error) },
        })?;
        let text = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        let text = text.map_err(|error| Error::Unreachable { endpoint: endpoint.into(), why: one_line(&error) })?;
        serde_json::from_slice(&text).map_err(|_| Error::Protocol { endpoint: endpoint.into() })
    }
}

/// What etcd calls a lease.
pub(crate) struct Lease(String);

/// The first key behind all that start with `prefix`, which does not end with 0xff.
fn behind(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

fn one_line(error: &ureq::Error) -> String {
    error.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    use super::*;

    /// Answers every request with the same, or closes the connection.
    struct Endpoint {
        host: Host,
        asked: Arc<AtomicUsize>,
        answers: Arc<AtomicBool>,
    }

    impl Endpoint {
        /// Its thread ends with the test program.
        fn start(body: String, answers: bool) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let host = Host { name: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
            let (asked, answers) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(answers)));
            let endpoint = Self { host, asked: Arc::clone(&asked), answers: Arc::clone(&answers) };
            std::thread::spawn(move || {
                for mut client in listener.incoming().flatten() {
                    asked.fetch_add(1, SeqCst);
                    client.set_read_timeout(Some(PATIENCE)).unwrap();
                    // What is asked is one object.
                    let mut ask = Vec::new();
                    while !ask.ends_with(b"}") {
                        let mut byte = [0];
                        let Ok(1) = client.read(&mut byte) else { break };
                        ask.extend(byte);
                    }
                    if answers.load(SeqCst) {
                        let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n";
                        let _ = write!(client, "{head}Content-Length: {}\r\n\r\n{body}", body.len());
                    }
                }
            });
            endpoint
        }

        fn asked(&self) -> usize {
            self.asked.load(SeqCst)
        }
    }

    #[test]
    fn the_endpoint_that_answered_last_is_asked_first() {
        let [one, two] = [false, true].map(|answers| Endpoint::start("{}".into(), answers));
        let etcd = Etcd::new(&[one.host.clone(), two.host.clone()]);
        assert_eq!(etcd.list("x/"), Ok(Vec::new()));
        let asked = (one.asked(), two.asked());
        assert!(asked.0 > 0, "the first is asked first");
        assert_eq!(etcd.list("x/"), Ok(Vec::new()));
        assert_eq!((one.asked(), two.asked()), (asked.0, asked.1 + 1));
        // Until it does not answer any more.
        one.answers.store(true, SeqCst);
        two.answers.store(false, SeqCst);
        assert_eq!(etcd.list("x/"), Ok(Vec::new()));
        let asked = two.asked();
        assert_eq!(etcd.list("x/"), Ok(Vec::new()));
        assert_eq!(two.asked(), asked);
        one.answers.store(false, SeqCst);
        assert!(matches!(etcd.list("x/"), Err(Error::Unreachable { .. })));
    }

    #[test]
    fn an_entry_without_a_value_spoils_nothing() {
        let entries = json!({ "kvs": [{ "key": "eA==" }, { "key": "eQ==", "value": BASE64.encode("here") }] });
        let endpoint = Endpoint::start(entries.to_string(), true);
        let etcd = Etcd::new(std::slice::from_ref(&endpoint.host));
        assert_eq!(etcd.list("x/"), Ok(vec![Vec::new(), b"here".to_vec()]));
    }
}
