//! Whether two URLs name the same pool, and what others may read of one.

use spillway_cluster::Host;

use super::Url;

/// Whether two URLs name the same servers, in whatever order, or the same cluster. Their parameters only say how it is used. A pool
/// without servers is nobody else's.
#[must_use]
pub fn is_same(one: &str, other: &str) -> bool {
    let (Ok(one), Ok(other)) = (Url::parse(one), Url::parse(other)) else { return false };
    match (one, other) {
        (Url::Tcp(one), Url::Tcp(other)) => are_same(&one.hosts, &other.hosts),
        (Url::Memcached(one), Url::Memcached(other)) | (Url::Redis(one), Url::Redis(other)) => {
            are_same(&one.hosts, &other.hosts)
        }
        (Url::Etcd(one), Url::Etcd(other)) => one.cluster.is_same(&other.cluster),
        _ => false,
    }
}

fn are_same(one: &[Host], other: &[Host]) -> bool {
    one.iter().all(|host| other.contains(host)) && other.iter().all(|host| one.contains(host))
}

/// A pool's URL without the password, if it has one.
#[must_use]
pub fn without_password(url: &str) -> String {
    let (place, query) = url.split_once('?').map_or((url, None), |(place, query)| (place, Some(query)));
    let place = match place.split_once("//").zip(place.rsplit_once('@')) {
        Some(((scheme, _), (_, hosts))) => format!("{scheme}//{hosts}"),
        None => place.to_owned(),
    };
    query.map_or(place.clone(), |query| format!("{place}?{query}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_its_servers() {
        for (one, other, same) in [
            ("tcp://a,b:7070,c?data=2&parity=1", "tcp://c,a:7070,b", true),
            ("tcp://a,b", "tcp://a", false),
            ("tcp://a", "tcp://a,b", false),
            ("tcp://a", "memcached://a:7070", false),
            ("redis://:x@a", "redis://a:6379?replicas=2", false),
            ("redis://:x@a,b", "redis://b,a?replicas=2", true),
            ("etcd://a/pool?data=4&parity=1", "etcd://a:2379/pool", true),
            ("etcd://a/pool", "etcd://a/loop", false),
            ("etcd://a/pool", "tcp://a", false),
            ("local:", "local:", false),
            ("", "", false),
        ] {
            assert_eq!(is_same(one, other), same, "{one} {other}");
        }
    }

    #[test]
    fn passwords_are_left_out() {
        for (url, shown) in [
            ("redis://:se@cret@a,b?replicas=2", "redis://a,b?replicas=2"),
            ("redis://a", "redis://a"),
            ("tcp://a?token-file=/x@y", "tcp://a?token-file=/x@y"),
            ("local:?size=1G", "local:?size=1G"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }
}
