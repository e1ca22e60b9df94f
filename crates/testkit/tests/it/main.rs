//! The local servers for real: they are started, killed and restarted as the tests of other packages do.

mod local_kafka;
mod local_redis;
