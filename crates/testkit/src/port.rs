//! TCP ports for servers that must know their port before they start, as Kafka must.

use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::unique::random;

/// Below the range from which Linux chooses ports for outgoing connections. Any client could get a port of that range while
/// its server restarts. Even worse, a client that reconnects may get the same port as its own and connect to itself.
const RANGE: Range<u16> = 15_000..32_000;

/// A port on 127.0.0.1 on which no process listens, different for each call in a process. It is not reserved, but the
/// search starts at a random port, so that other processes are unlikely to get the same one.
///
/// # Panics
/// If every port of the range is taken.
pub fn free_port() -> u16 {
    static START: OnceLock<u16> = OnceLock::new();
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let size = RANGE.end - RANGE.start;
    let start = *START.get_or_init(|| u16::try_from(random() % u64::from(size)).unwrap_or(0));
    for _ in 0..size {
        let step = NEXT.fetch_add(1, Ordering::Relaxed) % size;
        let port = RANGE.start + (start + step) % size;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!(
        "no free TCP port on 127.0.0.1 between {} and {}",
        RANGE.start, RANGE.end
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DEADLINE, eventually};

    #[test]
    fn ports_are_free_and_different() {
        let (first, second) = (free_port(), free_port());
        assert_ne!(first, second);
        assert!(RANGE.contains(&first) && RANGE.contains(&second));
        // A process that another test is just starting has a copy of the listener of `free_port` until it executes its program.
        eventually("the port is free", DEADLINE, || {
            TcpListener::bind((Ipv4Addr::LOCALHOST, second)).map(drop)
        });
    }
}
