//! The command `health` of the services.

use redeliver_testkit::{CommandOutput, ServiceProcess, run};

use crate::support::{Pipe, PipeBuilder};

/// Asks the process at the other process's address.
fn health(pipe: &Pipe, of: &mut ServiceProcess) -> CommandOutput {
    let listen = format!("admin.listen={}", of.admin());
    run(pipe.command("retry-tier", &["health", "--set", &listen]))
}

#[test]
fn health_is_readiness() {
    let pipe = PipeBuilder::new("health").tiers(&[5_000]).create();
    let mut ready = pipe.retry_tier("a");
    ready.until_ready();
    let printed = health(&pipe, &mut ready);
    assert_eq!(printed.code, Some(0), "{printed:?}");
    assert!(printed.stdout.contains(r#""ready":true"#), "{printed:?}");

    let unreachable = ["--set", "kafka.brokers=127.0.0.1:9"];
    let mut waiting = pipe.env.spawn("retry-tier", "b", &unreachable);
    let printed = health(&pipe, &mut waiting);
    assert_eq!(printed.code, Some(1), "{printed:?}");
    assert!(printed.stdout.contains(r#""ready":false"#), "{printed:?}");

    let address = waiting.admin();
    drop(waiting);
    let listen = format!("admin.listen={address}");
    let printed = run(pipe.command("retry-tier", &["health", "--set", &listen]));
    assert_eq!((printed.code, printed.stdout.as_str()), (Some(1), ""));
    let expected = format!("error: cannot read /readyz from the admin port {address}\ncaused by: ");
    assert!(printed.stderr.starts_with(&expected), "{printed:?}");

    let printed = run(pipe.command("retry-tier", &["health"]));
    let expected =
        "error: admin.listen: the port is 0, so the process listens on an unknown port; set a port\n";
    assert_eq!((printed.code, printed.stderr.as_str()), (Some(1), expected));
}
