//! What the tests of every package share: the real Kafka and Redis they talk to, our binaries as
//! processes that can be killed and frozen, an HTTP endpoint that misbehaves on purpose, and the one
//! way to wait for something.
//!
//! A dev-dependency only. `cargo xtask` depends on it too, because a broker for a test and a broker for
//! a whole test run are started by the same code.
//!
//! | module | idea |
//! |---|---|
//! | [`addresses`](mod@addresses) | where the shared Kafka and Redis are |
//! | [`services_file`] | what `cargo xtask services up` started and left running |
//! | [`unique`](mod@unique) | names no other test uses |
//! | [`eventually`](mod@eventually) | wait for a condition, with a deadline that says what was seen last |
//! | [`process`] | a program under test: kill, freeze, measure, read what it printed |
//! | [`member`] | a service under one name, over all its lives |
//! | [`local_kafka`], [`local_redis`] | a server of the test's own, to stop and restart at will |
//! | [`kafka_request`] | deleting topics and records |
//! | [`certificates`] | what servers show, and with the feature `tls` an authority of the test's own |
//! | [`fake_endpoint`] | an HTTP server that answers, hangs or hangs up as it is told |
//! | `otlp_receiver` | a collector that keeps the spans it is sent; feature `otlp` |
//! | [`languages`] | packages of programs in Python and Node.js |
//! | [`plan`] | which record meets which fate at that endpoint, as a pure function |
//! | [`port`] | TCP ports that stay free |
//! | [`daemon`] | a server that outlives the program that started it |
//! | [`scratch`] | directories that go away, even after a killed test run |
//! | [`target`] | where Cargo puts what it builds |

pub mod addresses;
pub mod certificates;
pub mod daemon;
pub mod eventually;
pub mod fake_endpoint;
mod hash;
mod kafka_jars;
mod kafka_probe;
pub mod kafka_request;
mod kept;
pub mod languages;
pub mod local_kafka;
pub mod local_redis;
pub mod member;
#[cfg(feature = "otlp")]
pub mod otlp_receiver;
pub mod plan;
pub mod port;
pub mod process;
pub mod scratch;
pub mod services_file;
pub mod target;
pub mod unique;

pub use addresses::{Addresses, addresses, brokers, redis_url};
pub use eventually::{eventually, eventually_async};
pub use fake_endpoint::{FakeEndpoint, Reply, Request};
pub use local_kafka::LocalKafka;
pub use local_redis::LocalRedis;
pub use member::ServiceProcess;
#[cfg(feature = "otlp")]
pub use otlp_receiver::{OtlpReceiver, ReceivedSpan};
pub use plan::{Fate, Plan, Trouble};
pub use port::free_port;
pub use process::{Process, binary};
pub use unique::unique;
