//! The addresses of the shared Kafka and Redis: from `KAFKA_BROKERS` and `REDIS_URL`, which `cargo xtask test` sets, or else
//! from what `cargo xtask services up` left running. A test that needs a server fails without it, and is never skipped.

use crate::services_file::{Server, ServicesFile};

/// The servers shared by all tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The value for `bootstrap.servers`.
    pub brokers: String,
    /// `redis://host:port`.
    pub redis_url: String,
}

/// Both addresses.
///
/// # Panics
/// If one of them is unknown; the message names the command that helps.
#[track_caller]
pub fn addresses() -> Addresses {
    Addresses {
        brokers: brokers(),
        redis_url: redis_url(),
    }
}

/// Kafka's address, for a test that needs no Redis.
///
/// # Panics
/// If it is unknown; the message names the command that helps.
#[track_caller]
pub fn brokers() -> String {
    find("Kafka", "KAFKA_BROKERS", |file| file.kafka)
}

/// Redis's address, for a test that needs no Kafka.
///
/// # Panics
/// If it is unknown; the message names the command that helps.
#[track_caller]
pub fn redis_url() -> String {
    find("Redis", "REDIS_URL", |file| file.redis)
}

#[track_caller]
fn find(server: &str, variable: &str, of: impl FnOnce(ServicesFile) -> Option<Server>) -> String {
    if let Some(given) = given(variable) {
        return given;
    }
    let file = ServicesFile::load().unwrap_or_else(|error| panic!("finding {server}: {error:#}"));
    match of(file) {
        Some(found) => found.address().to_owned(),
        None => panic!(
            "this test needs {server}: run `cargo xtask test`, or run `cargo xtask services up` before \
             `cargo test`, or set {variable}"
        ),
    }
}

/// The value of an environment variable, unless it is empty.
pub fn given(variable: &str) -> Option<String> {
    std::env::var(variable)
        .ok()
        .filter(|value| !value.trim().is_empty())
}
