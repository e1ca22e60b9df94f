//! A Redis that asks for TLS and a password.

use std::path::Path;

use fred::prelude::Value;
use redeliver_testkit::LocalRedis;
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::scratch::Scratch;

use crate::env::{PATIENCE, SchedulerEnv, Setup};
use crate::index::own_redis::Raw;
use crate::oracle::Wanted;
use crate::requests::Request;

const PASSWORD: &str = "hunter2";

/// A Redis that only lets in who knows the password, with a certificate that only who is told trusts.
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

    fn setup(&self, name: &str, password: &str, authority: &Authority) -> Setup {
        let file = authority.write(self.files.path(), name).unwrap();
        Setup::new(name)
            .redis(format!(
                "rediss://:{password}@127.0.0.1:{}",
                self.redis.tls_port()
            ))
            .set("redis.ca_file", path(&file))
            // So that jobs go through the index.
            .set("scheduler.window", "500ms")
    }

    /// A connection of the test's own, without TLS, which has set the password.
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
fn jobs_go_through_a_redis_that_asks_for_tls_and_a_password() {
    let guarded = Guarded::start();
    let env = guarded.setup("tls", PASSWORD, &guarded.authority).create();
    let raw = guarded.raw(&env);
    let mut scheduler = env.start("a");
    let later = |n: u32| Request::json(Wanted::new("mail", n.to_string()).after(3_000));
    let asked = env.ask((0..40).map(later).collect());
    env.settle(asked);
    let clients = env.block_on(raw.call(&["CLIENT", "LIST"])).into_string().unwrap();
    let over_tls = format!("laddr=127.0.0.1:{} ", guarded.redis.tls_port());
    assert!(clients.contains(&over_tls), "{clients}");
    assert_ne!(env.block_on(raw.call(&["DBSIZE"])), Value::Integer(0));
    let (_, config) = scheduler.get("/config").unwrap();
    assert!(config.contains("rediss://:redacted@127.0.0.1:"), "{config}");
    scheduler.end_in_order();
    for text in [config, scheduler.output()] {
        assert!(!text.contains(PASSWORD), "{text}");
    }
}

#[test]
fn a_redis_whose_certificate_nobody_vouches_for_is_not_used_and_the_reason_is_said() {
    let guarded = Guarded::start();
    let other = Authority::new().unwrap();
    let env = guarded.setup("untrusted", PASSWORD, &other).create();
    let raw = guarded.raw(&env);
    let mut scheduler = env.spawn("a");
    let said = scheduler
        .life()
        .wait_for_output("Redis cannot be used; connecting goes on", PATIENCE);
    let expected = "the certificate that Redis shows is not trusted (UnknownIssuer); redis.ca_file names";
    assert!(said.contains(expected), "{said}");
    scheduler.until_not_ready("the index is not up to date yet");
    assert_eq!(env.block_on(raw.call(&["DBSIZE"])), Value::Integer(0));
    // It waits for a certificate that is right, like for a Redis that is not there.
    scheduler.end_in_order();
    assert!(!scheduler.output().contains(PASSWORD), "{}", scheduler.output());
}

#[test]
fn a_wrong_password_for_redis_ends_the_process_and_is_not_shown() {
    let guarded = Guarded::start();
    let env = guarded.setup("password", "guessed", &guarded.authority).create();
    let _raw = guarded.raw(&env);
    let mut scheduler = env.spawn("a");
    let status = scheduler.life().wait(PATIENCE);
    let output = scheduler.output();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("Redis refuses the connection: "), "{output}");
    assert!(
        !output.contains("guessed") && !output.contains(PASSWORD),
        "{output}"
    );
}
