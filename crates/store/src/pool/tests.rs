use super::*;

fn local(text: &str) -> Config {
    match Url::parse(text) {
        Ok(Url::Local(config)) => config,
        other => panic!("{text}: {other:?}"),
    }
}

fn hosts(text: &str) -> Vec<String> {
    let hosts = match Url::parse(text) {
        Ok(Url::Tcp(Tcp { hosts, .. })) => hosts,
        Ok(Url::Memcached(Cache { hosts, .. }) | Url::Redis(Cache { hosts, .. })) => hosts,
        other => panic!("{text}: {other:?}"),
    };
    hosts.iter().map(ToString::to_string).collect()
}

#[test]
fn embedded_pools_are_read() {
    let default = Config::default();
    assert_eq!(local("local:"), default);
    assert_eq!(local("local:?"), default);
    assert_eq!(local("local:?compress=lz4&dedupe=1"), default);
    let other = Config { compression: Compression::None, dedupe: false, size_bytes: Some(3 << 29) };
    assert_eq!(local("local:?compress=none&dedupe=0&size=1.5GiB"), other);
    assert_eq!(local("local:?size=8M").size_bytes, Some(SIZE_MIN_BYTES));
}

#[test]
fn servers_are_read() {
    assert_eq!(hosts("tcp://a:7071,b"), ["a:7071", "b:7070"]);
    assert_eq!(hosts("memcached://cache-1.example"), ["cache-1.example:11211"]);
    assert_eq!(hosts("redis://:se:cr@et@[::1]:99,[fe80::1%eth0]/"), ["[::1]:99", "[fe80::1%eth0]:6379"]);
    let Ok(Url::Redis(redis)) = Url::parse("redis://:se:cr@et@h?deadline=1500ms") else { panic!("it is one") };
    assert_eq!(redis.password.as_deref(), Some("se:cr@et"));
    assert_eq!(redis.settings.deadline, Duration::from_millis(1500));
    let Ok(Url::Memcached(cache)) = Url::parse("memcached://h?lossy=1&prefix=a.b&compress=lz4") else {
        panic!("it is one")
    };
    assert_eq!((cache.lossy, cache.prefix.as_deref(), cache.compression), (true, Some("a.b"), Compression::Lz4));
    let Ok(Url::Tcp(tcp)) = Url::parse("tcp://h?token-file=/etc/token") else { panic!("it is one") };
    assert_eq!((tcp.token_file, tcp.tls), (Some("/etc/token".into()), None));
}

#[test]
fn stripes_are_read() {
    let shape = |text: &str| match Url::parse(text) {
        Ok(Url::Tcp(tcp)) => tcp.stripes,
        Ok(Url::Memcached(cache) | Url::Redis(cache)) => cache.stripes,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(shape("tcp://a,b,c"), None);
    assert_eq!(shape("tcp://a,b,c,d,e?data=4&parity=1"), Some(Shape { data: 4, parity: 1 }));
    assert_eq!(shape("memcached://a,b,c,d?parity=2&data=2"), Some(Shape { data: 2, parity: 2 }));
    assert_eq!(shape("redis://a,b,c?replicas=2"), Some(Shape { data: 1, parity: 1 }));
}

#[test]
fn tls_is_read() {
    let tls = |text: &str| match Url::parse(text) {
        Ok(Url::Tcp(tcp)) => tcp.tls,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(tls("tcp://h?tls=0"), None);
    assert_eq!(tls("tcp://h?tls=1&tls-ca=/ca"), Some(Tls { ca: "/ca".into(), identity: None, name: None }));
    let identity = Some(("/cert".into(), "/key".into()));
    let all = Tls { ca: "/ca".into(), identity, name: Some("pool.example".into()) };
    assert_eq!(tls("tcp://h,i?tls-name=pool.example&tls-key=/key&tls-cert=/cert&tls-ca=/ca&tls=1"), Some(all));
    assert!(tls("tcp://h?tls=1&tls-ca=/ca&tls-name=::1").is_some());
}

#[test]
fn files_and_emulations_are_read() {
    let file = File { path: "/nvme/pool".into(), size_bytes: 8 << 30, layer: layer::Config::default() };
    assert_eq!(Url::parse("file:///nvme/pool?size=8G"), Ok(Url::File(file)));
    let layer = layer::Config {
        delay: Duration::from_millis(1),
        lose_one_in: 1000,
        stall_one_in: 10,
        stall: Duration::from_millis(50),
        ..layer::Config::default()
    };
    let Ok(Url::Tcp(tcp)) = Url::parse("tcp://h?delay=1ms&fault=lose:1000,stall:10:50ms") else { panic!("it is one") };
    assert_eq!(tcp.layer, layer);
    let emulated = Emulated { delay: Duration::from_micros(4), serialize: true, size_bytes: None };
    assert_eq!(Url::parse("emulated:?delay=4us&serialize=1"), Ok(Url::Emulated(emulated)));
}

#[test]
fn mistakes_are_named_in_a_line_with_their_remedy() {
    let schemes = "those known are `local:`, `tcp:`, `etcd:`, `memcached:`, `redis:`, `file:` and `emulated:`";
    let mistakes = [
        ("", &*format!("pool `` has no scheme: {schemes}")),
        ("udp://a:7070", &*format!("pool scheme `udp:` is unknown: {schemes}")),
        ("local:x?size=1G", "`local:` takes no path, but `x` follows it: parameters start with `?`"),
        ("local:?a=1", "`local:` has no parameter `a`: it has `compress`, `dedupe` and `size`"),
        ("file:///x?a=1", "`file:` has no parameter `a`: it has `delay`, `fault` and `size`"),
        (
            "tcp://h?fault=lose:0",
            "pool parameter `fault` cannot be `lose:0`: give faults such as \
             `lose:1000,corrupt:1000,decline:10,stall:100:50ms`, each one in so many",
        ),
        ("local:?size=1G&size=2G", "pool parameter `size` is given twice: keep one"),
        ("tcp://h?tls=yes", "pool parameter `tls` cannot be `yes`: give `0` or `1`"),
        ("tcp://h?tls=1", "pool parameter `tls` is nothing without another: give `tls-ca=FILE` with it"),
        ("tcp://h?tls-ca=/x", "pool parameter `tls-ca` is nothing without another: give `tls=1` with it"),
        ("tcp://h?tls=0&tls-name=x", "pool parameter `tls-name` is nothing without another: give `tls=1` with it"),
        (
            "tcp://h?tls=1&tls-ca=/x&tls-cert=/y",
            "pool parameter `tls-cert` is nothing without another: give `tls-key=FILE` with it",
        ),
        (
            "tcp://h?tls=1&tls-ca=/x&tls-key=/y",
            "pool parameter `tls-key` is nothing without another: give `tls-cert=FILE` with it",
        ),
        (
            "tcp://h?tls=1&tls-ca=/x&tls-name=a b",
            "pool parameter `tls-name` cannot be `a b`: give a name or an address as certificates have it",
        ),
        (
            "memcached://h?tls=1",
            "`memcached:` has no parameter `tls`: it has `compress`, `data`, `deadline`, `delay`, `fault`, `lossy`, \
             `parity`, `prefix` and `replicas`",
        ),
        (
            "tcp://a,b,c?data=4&parity=1",
            "a pool with `data=4&parity=1` needs 5 servers, but 3 are named: name 2 more, or give `data=2&parity=1`",
        ),
        (
            "tcp://a,b?data=2&parity=1",
            "a pool with `data=2&parity=1` needs 3 servers, but 2 are named: name 1 more, or give `replicas=2`",
        ),
        ("tcp://a?replicas=2", "a pool with `replicas=2` needs 2 servers, but 1 is named: name 1 more"),
        ("tcp://a,b?parity=1", "pool parameter `parity` is nothing without another: give `data=4` with it"),
        ("redis://a,b?data=1", "pool parameter `data` is nothing without another: give `parity=1` with it"),
        (
            "tcp://a,b?data=17&parity=1",
            "pool parameter `data` cannot be `17`: give a number of pages in a group, 1 to 16",
        ),
        (
            "tcp://a,b?data=4&parity=3",
            "pool parameter `parity` cannot be `3`: give how many servers may be lost, `1` or `2`",
        ),
        (
            "tcp://a,b?data=1&parity=1&replicas=2",
            "`replicas` and `data` with `parity` are two ways to survive a loss: keep one of them",
        ),
        ("local:?compress=zstd", "pool parameter `compress` cannot be `zstd`: give `lz4` or `none`"),
        ("local:?dedupe", "pool parameter `dedupe` cannot be ``: give `0` or `1`"),
        ("local:?size=1M", "pool parameter `size` is 1048576 bytes: give at least 8M"),
        ("file:///x?size=4K", "pool parameter `size` is 4096 bytes: give at least 1M"),
        ("tcp:a", "`tcp:` names no server: give `tcp://HOST[:PORT],...`"),
        ("tcp://", "`tcp:` names no server: give `tcp://HOST[:PORT],...`"),
        ("tcp://a,,b", "`` is no server: give a name or an address, `HOST[:PORT]` or `[IPV6]:PORT`"),
        ("tcp://a:0", "`a:0` is no server: give a name or an address, `HOST[:PORT]` or `[IPV6]:PORT`"),
        ("tcp://[::1", "`[::1` is no server: give a name or an address, `HOST[:PORT]` or `[IPV6]:PORT`"),
        ("tcp://a@b", "`a@b` is no server: give a name or an address, `HOST[:PORT]` or `[IPV6]:PORT`"),
        ("tcp://a,b,a:7070", "`a:7070` is named twice: name each server once"),
        ("redis://me@h", "`redis:` takes a password and no user: give `redis://:PASSWORD@HOST`"),
        (
            "tcp://h?deadline=1h",
            "pool parameter `deadline` cannot be `1h`: give a time such as `4us`, `250ms` or `10s`, up to an hour",
        ),
        ("tcp://h:1,g:1,h:1", "`h:1` is named twice: name each server once"),
        ("tcp://h?deadline=1ms", "pool parameter `deadline` cannot be `1ms`: give at least `100ms`"),
        (
            "memcached://h?prefix=a b",
            "pool parameter `prefix` cannot be `a b`: give 1 to 200 letters, digits and `-_.:`",
        ),
        ("file://x?size=1G", "`file:` needs an absolute path, not `x`: give `file:///PATH?size=8G`"),
        ("file:///x", "`file:` needs a size: give `file:///PATH?size=8G`"),
        ("local:?size=50%", "pool parameter `size`: `50%` is a share: a number of bytes is needed here, such as 512M"),
    ];
    for (text, line) in mistakes {
        assert_eq!(Url::parse(text).unwrap_err().to_string(), line);
    }
    let many = format!("tcp://{}a", "a,".repeat(255));
    assert_eq!(Url::parse(&many).unwrap_err().to_string(), "a pool of 256 servers is too large: give at most 255");
}

#[test]
fn what_users_typed_cannot_break_the_line() {
    let error = Url::parse("lo\ncal:").unwrap_err().to_string();
    assert!(error.starts_with("pool scheme `lo\\ncal:` is unknown"), "{error}");
}
