//! Whatever is typed after `--pool` names a pool or gives one clear line.

use spillway_store::local::SIZE_MIN_BYTES;
use spillway_store::pool::{Host, Url};

fn check_hosts(hosts: &[Host]) {
    assert!((1..=255).contains(&hosts.len()));
    for host in hosts {
        assert!(host.port != 0 && !host.name.is_empty() && !host.name.contains(char::is_whitespace));
    }
}

/// Holds one input to it.
pub fn check(text: &str) {
    match Url::parse(text) {
        Ok(Url::Local(config)) => {
            assert!(text.starts_with("local:"));
            assert!(config.size_bytes.is_none_or(|bytes| bytes >= SIZE_MIN_BYTES));
        }
        Ok(Url::Memcached(cache)) | Ok(Url::Redis(cache)) => {
            check_hosts(&cache.hosts);
            assert!(cache.prefix.is_none_or(|prefix| (1..=200).contains(&prefix.len())));
            assert!(cache.settings.deadline.as_millis() >= 100);
        }
        Ok(Url::Tcp(tcp)) => {
            check_hosts(&tcp.hosts);
            let query = text.split_once('?').map_or("", |(_, query)| query);
            assert_eq!(tcp.tls.is_some(), query.split('&').any(|parameter| parameter == "tls=1"));
            let name = tcp.tls.and_then(|tls| tls.name);
            assert!(name.is_none_or(|name| !name.is_empty() && !name.contains(char::is_whitespace)));
        }
        Ok(Url::Etcd(etcd)) => assert!(etcd.tcp.hosts.is_empty() && etcd.cluster.to_string().starts_with("etcd://")),
        Ok(Url::File(file)) => assert!(file.path.is_absolute() && file.size_bytes >= 1 << 20),
        Ok(Url::Emulated(emulated)) => assert!(emulated.delay.as_secs() <= 3600),
        Err(error) => {
            let line = error.to_string();
            assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
        }
    }
}
