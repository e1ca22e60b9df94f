//! What the tests of all packages share: the Kafka and the Redis they use, our binaries as processes that can be
//! killed and frozen, an HTTP endpoint with planned failures, and one way to wait for a condition.
//!
//! A dev-dependency. `cargo xtask` and the benchmarks depend on it too, because the same code starts the servers of a single test
//! and those of a whole test run.
//!
//! | module | idea |
//! |---|---|
//! | [`acls`] | a Kafka whose topics become read-only or invisible |
//! | [`addresses`](mod@addresses) | the addresses of the shared Kafka and Redis |
//! | [`services_file`] | what `cargo xtask services up` started and left running |
//! | [`unique`](mod@unique) | names and delays that no other test uses |
//! | [`eventually`](mod@eventually) | waits for a condition, with a deadline, and reports the last observation |
//! | [`process`] | a program under test: kill, freeze, measure, read its output |
//! | `EnvBuilder`, `TestEnv` | the configuration of a test and the processes that run with it; feature `services` |
//! | `ServiceProcess` | one of our services, which can be killed and started again; feature `services` |
//! | `http` | the HTTP client of the tests; feature `services` |
//! | [`chaos_random`] | random choices that follow a seed |
//! | [`fuzz`](mod@fuzz) | damaged inputs for decoders |
//! | [`valid_json`] | what valid JSON can contain |
//! | `under_load`, `until_shared`, ... | what chaos tests share; feature `services` |
//! | [`local_kafka`], [`local_redis`] | a server that belongs to one test, which can stop and restart it |
//! | [`local_kube`] | a Kubernetes API server with fake nodes that belongs to one test |
//! | [`kube_tools`] | the programs with which the Helm chart and the gRPC API are tested |
//! | [`kafka_request`] | deletes topics and records |
//! | `kafka_tools` | scripts that call Kafka's own tools; feature `services` |
//! | [`certificates`] | certificates of servers; with the feature `tls` also an authority that belongs to one test |
//! | `issuer` | issues tokens with which clients log in to Kafka; feature `tls` |
//! | [`fake_endpoint`] | an HTTP server that answers, hangs or hangs up as it is told |
//! | `otlp_receiver` | a collector that keeps the spans it receives; feature `otlp` |
//! | `jwt` | an issuer of JSON Web Tokens; feature `jwt` |
//! | `oidc_provider` | an OpenID Connect provider at which browsers sign in; feature `oidc` |
//! | [`languages`] | programs in Python, Node.js and Java |
//! | [`plan`] | which record fails how at that endpoint, as a pure function |
//! | [`record`](mod@record) | records in memory |
//! | [`port`] | TCP ports that stay free |
//! | [`daemon`] | a server that outlives the program that started it |
//! | [`scratch`] | directories that are removed, even after a killed test run |
//! | [`target`] | where Cargo puts what it builds |

#![expect(clippy::disallowed_types, reason = "documents of tests")]

pub mod acls;
pub mod addresses;
pub mod certificates;
#[cfg(feature = "services")]
mod chaos;
pub mod daemon;
#[cfg(feature = "services")]
mod env;
pub mod eventually;
pub mod fake_endpoint;
pub mod fuzz;
mod hash;
#[cfg(feature = "services")]
pub mod http;
#[cfg(feature = "tls")]
pub mod issuer;
mod jars;
#[cfg(feature = "jwt")]
pub mod jwt;
mod kafka_probe;
pub mod kafka_request;
#[cfg(feature = "services")]
pub mod kafka_tools;
mod kept;
pub mod kube_tools;
pub mod languages;
pub mod local_kafka;
pub mod local_kube;
pub mod local_redis;
mod local_redis_cluster;
#[cfg(feature = "services")]
pub mod local_schema_registry;
#[cfg(feature = "oidc")]
pub mod oidc_provider;
#[cfg(feature = "otlp")]
pub mod otlp_receiver;
pub mod plan;
pub mod port;
pub mod process;
pub mod record;
pub mod scratch;
mod seed;
#[cfg(feature = "services")]
mod service_process;
pub mod services_file;
pub mod target;
pub mod unique;
pub mod valid_json;

pub use addresses::{Addresses, addresses, brokers, redis_url};
#[cfg(feature = "services")]
pub use chaos::{
    ChaosPermit, chaos_with_permit, sleep_up_to, under_load, until_in_sync, until_second_broker_leads,
    until_shared,
};
#[cfg(feature = "services")]
pub use env::{EnvBuilder, TestEnv};
pub use eventually::{DEADLINE, ensure, eventually, eventually_async, until_seen};
pub use fake_endpoint::{FakeEndpoint, Reply, Request};
pub use local_kafka::LocalKafka;
pub use local_kube::LocalKube;
pub use local_redis::LocalRedis;
pub use local_redis_cluster::LocalRedisCluster;
#[cfg(feature = "services")]
pub use local_schema_registry::LocalSchemaRegistry;
#[cfg(feature = "otlp")]
pub use otlp_receiver::{OtlpReceiver, ReceivedSpan};
pub use plan::{Fate, Plan, Trouble};
pub use port::free_port;
pub use process::{CommandOutput, Process, binary, run};
pub use record::{record, record_at};
pub use seed::chaos_random;
#[cfg(feature = "services")]
pub use service_process::ServiceProcess;
pub use unique::{unique, unique_delays};
