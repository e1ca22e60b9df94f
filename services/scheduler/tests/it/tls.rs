//! A Redis that requires TLS and a password.

use std::path::Path;

use fred::prelude::Value;
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{EnvBuilder, LocalRedis};

use crate::env::{DEADLINE, SchedulerEnv};
use crate::index::own_redis::Raw;
use crate::oracle::JobSpec;
use crate::requests::Request;

const PASSWORD: &str = "hunter2";

/// A Redis that requires a password, with a certificate of an authority that no machine trusts.
struct Guarded {
    redis: LocalRedis,
    authority: Authority,
    files: Scratch,
}

impl Guarded {
    fn start() -> Self {
        let authority = Authority::new().unwrap();
        Self {
            redis: LocalRedis::start_with_tls(&authority.sign().unwrap()).unwrap(),
            authority,
            files: Scratch::new("authorities").unwrap(),
        }
    }

    fn setup(&self, name: &str, password: &str, authority: &Authority) -> EnvBuilder {
        let file = authority.write(self.files.path(), name).unwrap();
        SchedulerEnv::builder(name)
            .redis(format!(
                "rediss://:{password}@127.0.0.1:{}",
                self.redis.tls_port()
            ))
            .set("redis.ca_file", path(&file))
            // A short window, so that jobs go through the index.
            .set("scheduler.window", "500ms")
    }

    /// Sets the password over a connection without TLS.
    fn raw(&self, env: &SchedulerEnv) -> Raw {
        env.block_on(async {
            let raw = Raw::connect(&self.redis.url()).await;
            raw.call(&["CONFIG", "SET", "requirepass", PASSWORD]).await;
            raw
        })
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn redis_with_tls_indexes_jobs() {
    let guarded = Guarded::start();
    let env = SchedulerEnv::new(guarded.setup("tls", PASSWORD, &guarded.authority));
    let raw = guarded.raw(&env);
    let mut scheduler = env.start("a");
    let later = |n: u32| Request::json(JobSpec::new("mail", n.to_string()).after(3_000));
    let sent = env.send((0..40).map(later).collect());
    env.settle(sent);
    let clients = env.block_on(raw.call(&["CLIENT", "LIST"])).into_string().unwrap();
    let over_tls = format!("laddr=127.0.0.1:{} ", guarded.redis.tls_port());
    assert!(clients.contains(&over_tls), "{clients}");
    assert_ne!(env.block_on(raw.call(&["DBSIZE"])), Value::Integer(0));
    let (_, config) = scheduler.get("/config");
    assert!(config.contains("rediss://:redacted@127.0.0.1:"), "{config}");
    scheduler.shut_down();
    for text in [config, scheduler.output()] {
        assert!(!text.contains(PASSWORD), "{text}");
    }
}

#[test]
fn untrusted_certificate_is_refused() {
    let guarded = Guarded::start();
    let other = Authority::new().unwrap();
    let env = SchedulerEnv::new(guarded.setup("untrusted", PASSWORD, &other));
    let raw = guarded.raw(&env);
    let mut scheduler = env.spawn("a");
    let said = scheduler.wait_for_output("Redis unavailable; reconnecting", DEADLINE);
    let expected = "the certificate of Redis is not trusted (UnknownIssuer); set redis.ca_file";
    assert!(said.contains(expected), "{said}");
    scheduler.until_not_ready("index not up to date");
    assert_eq!(env.block_on(raw.call(&["DBSIZE"])), Value::Integer(0));
    // The scheduler keeps waiting, as for an unavailable Redis.
    scheduler.shut_down();
    assert!(!scheduler.output().contains(PASSWORD), "{}", scheduler.output());
}

#[test]
fn wrong_password_ends_the_process() {
    let guarded = Guarded::start();
    let env = SchedulerEnv::new(guarded.setup("password", "guessed", &guarded.authority));
    let _raw = guarded.raw(&env);
    let mut scheduler = env.spawn("a");
    let status = scheduler.wait(DEADLINE);
    let output = scheduler.output();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("Redis refuses the connection: "), "{output}");
    assert!(
        !output.contains("guessed") && !output.contains(PASSWORD),
        "{output}"
    );
}
