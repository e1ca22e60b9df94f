//! The file descriptors that connections may use.
//!
//! A process without file descriptors can accept no connection on any port, nor connect to Kafka. So connections get a share of them.

use rustix::process::{Resource, getrlimit};

/// This number of connections, or the number that half of the file descriptors of this process allow, if that is less.
pub(super) fn at_most_half(connections: usize) -> usize {
    let allowed = at_most(connections, limit());
    if allowed < connections {
        tracing::info!(
            connections,
            allowed,
            "connections limited to fewer than configured, because of RLIMIT_NOFILE"
        );
    }
    allowed
}

fn at_most(connections: usize, descriptors: Option<u64>) -> usize {
    let half = descriptors.and_then(|limit| usize::try_from(limit / 2).ok());
    half.map_or(connections, |half| connections.min(half.max(1)))
}

/// The maximum number of file descriptors. `None`: no limit.
fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_use_half_the_descriptors() {
        for (connections, descriptors, allowed) in [
            (10_000, Some(1_048_576), 10_000),
            (10_000, Some(1_024), 512),
            (500, Some(1_024), 500),
            (10_000, None, 10_000),
            (10_000, Some(0), 1),
        ] {
            assert_eq!(at_most(connections, descriptors), allowed);
        }
        assert!(limit().is_none_or(|limit| limit > 0));
    }
}
