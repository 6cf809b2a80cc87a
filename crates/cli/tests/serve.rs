//! `spillway serve`: what it refuses, what it says, how it ends.

#[path = "../../server/tests/common/certificates.rs"]
mod certificates;
mod common;
use certificates::{Authority, text};
use common::{Running, done, err, eventually, kill, out};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

fn refusal(args: &[&str]) -> String {
    let done = done(&[&["serve"], args].concat());
    let text = err(&done);
    assert_eq!((done.status.code(), out(&done).as_str()), (Some(2), ""), "{args:?}: {text}");
    assert!(text.starts_with("spillway: ") && text.lines().count() == 1, "{args:?}: {text}");
    text
}

/// A file that is removed with the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, content: &str, mode: u32) -> Self {
        let path = std::env::temp_dir().join(format!("spillway-serve-{name}-{}", std::process::id()));
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("text")
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn bad_input_is_one_line_that_names_the_remedy() {
    assert!(refusal(&["--listen", "0.0.0.0:0"]).contains("--token-file FILE"));
    assert!(refusal(&["--listen", "[::]:0"]).contains("127.0.0.1"));
    for address in ["", "here", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "nosuch.invalid:1"] {
        assert!(refusal(&["--listen", address]).contains("HOST:PORT"), "{address}");
    }
    for size in ["", "x", "10", "50%", "1000000T"] {
        refusal(&["--listen", "127.0.0.1:0", "--memory", size]);
    }
    assert!(refusal(&["--spill", "/tmp/x"]).contains("--spill-size"));
    assert!(refusal(&["--spill-size", "1G"]).contains("--spill"));
    let spill = ["--listen", "127.0.0.1:0", "--memory", "4M", "--spill", "/nonexistent/x", "--spill-size", "4M"];
    assert!(refusal(&spill).contains("/nonexistent/x"));
    refusal(&["--no-dedupe", "--dedupe-across-tenants"]);
    refusal(&["--lease", "0"]);
}

#[test]
fn tokens_that_are_none_are_refused() {
    let short = Temporary::new("short", "secret\n", 0o600);
    assert!(refusal(&["--token-file", short.path()]).contains("openssl rand"));
    let open = Temporary::new("open", "0123456789abcdef0123456789abcdef\n", 0o644);
    assert!(refusal(&["--token-file", open.path()]).contains("chmod 600"));
    assert!(refusal(&["--token-file", "/nonexistent"]).contains("/nonexistent"));
}

#[test]
fn tls_needs_its_files_and_clients_that_are_known() {
    assert!(refusal(&["--tls-cert", "x"]).contains("--tls-key"));
    assert!(refusal(&["--tls-key", "x"]).contains("--tls-cert"));
    assert!(refusal(&["--client-ca", "x"]).contains("--tls-cert"));
    let authority = Authority::new();
    let (pair, other) = (authority.issue("server", &["localhost"]), authority.issue("other", &["localhost"]));
    let (cert, key) = (text(&pair.certificate), text(&pair.key));
    let serve = |cert: &str, key: &str, more: &[&str]| {
        refusal(&[&["--listen", "0.0.0.0:0", "--tls-cert", cert, "--tls-key", key], more].concat())
    };
    let line = serve(cert, key, &[]);
    assert!(line.contains("TLS without client authentication lets strangers store"), "{line}");
    assert!(line.contains("--client-ca FILE or --token-file FILE"), "{line}");
    assert!(serve("/nonexistent", key, &[]).contains("the certificate in `/nonexistent` cannot be read"));
    assert!(serve(key, key, &[]).contains("holds no certificate"));
    assert!(serve(cert, cert, &[]).contains("chmod 600"));
    assert!(serve(cert, text(&other.key), &[]).contains("is not that of the certificate"));
    assert!(serve(cert, key, &["--client-ca", key]).contains("holds no authority's certificate"));
    let exposed = authority.file("exposed", &fs::read_to_string(key).expect("read"), 0o644);
    assert!(serve(cert, text(&exposed), &[]).contains("others can read the private key"));
}

#[test]
fn the_network_may_come_in_where_clients_show_certificates() {
    let authority = Authority::new();
    let (ca, pair) = (authority.ca(), authority.issue("server", &["localhost"]));
    let files = ["--tls-cert", text(&pair.certificate), "--tls-key", text(&pair.key), "--client-ca", text(&ca)];
    let args = [&["serve", "--listen", "0.0.0.0:0", "--memory", "16M"][..], &files].concat();
    let mut running = Running::start(&args);
    let mut line = String::new();
    BufReader::new(running.child.stderr.take().expect("captured")).read_line(&mut line).expect("a line");
    assert!(line.contains(" over TLS on 0.0.0.0:"), "{line}");
    let port = line.split("0.0.0.0:").nth(1).and_then(|rest| rest.split(';').next()).expect("a port");
    let (client, ca) = (authority.issue("client", &["me"]), text(&ca));
    let url = format!("tcp://localhost:{port}?tls=1&tls-ca={ca}");
    let shown = format!("{url}&tls-cert={}&tls-key={}", text(&client.certificate), text(&client.key));
    let status = done(&["pool", "status", &shown]);
    assert_eq!((status.status.code(), err(&status).as_str()), (Some(0), ""), "{}", out(&status));
    let status = done(&["pool", "status", &url]);
    assert!(status.status.code() == Some(1) && out(&status).contains("give `tls-cert`"), "{}", out(&status));
}

#[test]
fn it_says_where_it_listens_and_ends_cleanly() {
    let token = Temporary::new("good", "0123456789abcdef0123456789abcdef\n", 0o600);
    for signal in ["TERM", "INT"] {
        let args = ["serve", "--listen", "0.0.0.0:0", "--memory", "16M", "--token-file", token.path()];
        let mut running = Running::start(&args);
        let stderr = running.child.stderr.take().expect("captured");
        let mut lines = BufReader::new(stderr);
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        assert!(line.starts_with("spillway: lending 16 MiB on 0.0.0.0:") || line.contains("16.0 MiB on"), "{line}");
        assert!(!line.contains("only this host"), "{line}");
        let port = line.split("0.0.0.0:").nth(1).and_then(|rest| rest.split(';').next()).expect("a port");
        let mut stream = TcpStream::connect(("127.0.0.1", port.parse().expect("a number"))).expect("connected");
        let mut challenge = [0; 8];
        stream.read_exact(&mut challenge).expect("a challenge");
        assert_eq!(&challenge, b"SPILLWAY");
        kill(signal, &running.pid().to_string());
        let status = eventually("the end", || running.child.try_wait().expect("waited"));
        assert!(status.success(), "{status}");
        let mut rest = String::new();
        lines.read_to_string(&mut rest).expect("text");
        assert_eq!(rest, "");
    }
}

#[test]
fn it_says_where_only_this_host_reaches_it() {
    let mut running = Running::start(&["serve", "--listen", "127.0.0.1:0", "--memory", "16M"]);
    let mut line = String::new();
    BufReader::new(running.child.stderr.take().expect("captured")).read_line(&mut line).expect("a line");
    assert!(line.contains("; only this host reaches it (see --listen); "), "{line}");
}

#[test]
fn a_port_that_is_taken_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = taken.local_addr().expect("bound").to_string();
    assert!(refusal(&["--listen", &address, "--memory", "4M"]).contains("--listen"));
}
