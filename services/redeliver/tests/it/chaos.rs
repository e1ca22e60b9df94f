//! Chaos tests: the real binaries under load while they are killed, frozen, restarted, duplicated and cut off from Kafka.
//! After each test, the audit must find every record exactly once, not early and unchanged (I1, I2, I3). Each test counts
//! what it did, since a run that killed nothing proves nothing.
//!
//! Random choices follow a seed, which is printed; `REDELIVER_CHAOS_SEED` sets it.

mod calls_in_hand;
pub(crate) mod load;
mod three_brokers;
mod upgrade;
mod whole_house;

use std::thread;
use std::time::Duration;

use redeliver_audit::Report;
use redeliver_testkit::{
    ChaosPermit, Fate, LocalKafka, Plan, Reply, Request, ServiceProcess, Trouble, chaos_with_permit,
    eventually, sleep_up_to, until_second_broker_leads, until_shared,
};

use crate::support::{DEADLINE, PLAN, Pipe, PipeBuilder, Sent};
use load::under_load;

const PARTITIONS: u32 = 4;
/// The partitions of each service: enrichers read the source and the due topic, retry tiers the topics of two tiers.
const OWNED: u64 = 2 * PARTITIONS as u64;
const SERVICES: [&str; 2] = ["enricher", "retry-tier"];

/// The shortest session timeout that the configuration allows.
const SESSION: Duration = Duration::from_secs(6);
/// Much longer than a restart takes, on any machine.
const LONG_SESSION: Duration = Duration::from_secs(60);

fn setup(name: &str) -> PipeBuilder {
    PipeBuilder::new(&format!("chaos-{name}"))
        .partitions(PARTITIONS)
        .tiers(&[1_000, 2_000])
        .set("kafka.static_membership", "true")
        .set("kafka.session_timeout", &format!("{}s", SESSION.as_secs()))
        // A call of a process that is frozen or gets no CPU time must not time out, which would count as a failure.
        .pipeline("http.timeout", "60s")
        .behave(|request| delayed(request, PLAN.reply(request)))
}

/// Delays successes by 0 to 5 ms.
fn delayed(request: &Request, reply: Reply) -> Reply {
    let millis = request.body.iter().map(|byte| u64::from(*byte)).sum::<u64>() % 6;
    match reply {
        Reply::Status(200, ..) => Reply::Delay(Duration::from_millis(millis), Box::new(reply)),
        other => other,
    }
}

/// Waits until nothing is waiting. Every record must be where its fate says, none twice, early or altered.
#[track_caller]
pub(crate) fn settle(pipe: &Pipe, sent: &[Sent], plan: &Plan) -> Box<Report> {
    let count = sent.len() as u64;
    let report = pipe.settle(sent, DEADLINE).report;
    assert!(report.foreign.is_empty(), "{report}");
    let refused = sent
        .iter()
        .filter(|sent| plan.fate(sent.body()) == Fate::Refused)
        .count() as u64;
    assert_eq!((report.source, report.dead), (count, refused), "{report}");
    assert_eq!(report.output, count - refused, "{report}");
    assert_eq!(
        report.dead_by_class,
        [("permanent".to_owned(), refused)].into(),
        "{report}"
    );
    assert!(report.min_margin_ms.is_some_and(|margin| margin >= 0), "{report}");
    // A call whose response was lost with its process is repeated, so there may be fewer failures than planned, but never
    // more.
    let planned: u64 = sent
        .iter()
        .map(|sent| match plan.fate(sent.body()) {
            Fate::Succeeds => 0,
            Fate::Recovers { failures, .. } => u64::from(failures),
            Fate::Refused => 1,
        })
        .sum();
    let counted: u64 = report
        .retries
        .iter()
        .map(|(retries, count)| u64::from(*retries) * count)
        .sum();
    assert!(
        counted <= planned,
        "{counted} failed attempts, {planned} planned: {report}"
    );
    println!("{report}");
    report
}

/// Kills a process this many times, three out of four times when it is ready, otherwise while it may be starting. Starts
/// it again at once.
fn kill_and_start_again(member: &mut ServiceProcess, kills: u32, mut random: fastrand::Rng) {
    for kill in 0..kills {
        if kill % 2 == 0 || random.bool() {
            member.until_ready();
            sleep_up_to(&mut random, Duration::from_millis(1_000));
        } else {
            sleep_up_to(&mut random, Duration::from_millis(2_000));
        }
        member.kill_9();
        member.start_again();
    }
    member.until_ready();
}

/// Kills both services repeatedly, at the same time.
fn kill_both(pipe: &Pipe, kills: u32, per_second: u32, random: &mut fastrand::Rng) -> [ServiceProcess; 2] {
    let mut members = SERVICES.map(|service| pipe.start(service, "a", &[]));
    let sent = under_load(pipe, per_second, |load| {
        thread::scope(|scope| {
            for member in &mut members {
                let random = random.fork();
                scope.spawn(move || kill_and_start_again(member, kills, random));
            }
        });
        load.until_ended(100);
    });
    settle(pipe, &sent, &PLAN);
    for member in &members {
        println!("{member}");
        assert_eq!(member.kills(), kills);
        assert!(
            member.kills_when_ready() * 2 >= kills,
            "only {} of {kills} kills hit one that was ready: {member}",
            member.kills_when_ready(),
        );
    }
    members
}

#[test]
fn kills_lose_and_duplicate_nothing() {
    kill_at_random_moments(4);
}

#[test]
#[ignore = "long"]
fn many_kills_lose_and_duplicate_nothing() {
    kill_at_random_moments(20);
}

fn kill_at_random_moments(kills: u32) {
    let (_permit, mut random) = chaos_with_permit("kills");
    let session = format!("{}s", LONG_SESSION.as_secs());
    let pipe = setup("kills").set("kafka.session_timeout", &session).create();
    let members = kill_both(&pipe, kills, 320, &mut random);
    for member in &members {
        // Static membership exists for this: without it, each restart would wait for the session of the dead member.
        assert!(member.median_restart() < LONG_SESSION / 2, "{member}");
    }
}

#[test]
#[ignore = "long"]
fn kills_of_dynamic_members_lose_nothing() {
    let (_permit, mut random) = chaos_with_permit("dynamic");
    let pipe = setup("dynamic").set("kafka.static_membership", "false").create();
    kill_both(&pipe, 4, 120, &mut random);
}

/// The fault points of a transaction, in their order: the producer is initialised, a batch is complete, the transaction has
/// begun, a record was passed to the client, all records are delivered, the offsets are added, the transaction is committed.
const STEPS_OF_A_TRANSACTION: [&str; 7] = [
    "initialise",
    "batch",
    "begin",
    "send",
    "produce",
    "offsets",
    "commit",
];

/// Crashes a process at each step of a transaction, when it reaches the step for the Nth time, for each N of
/// `times`, and starts it again. Returns the number of crashes.
fn crash_at_each_step(member: &mut ServiceProcess, times: &[u32]) -> u32 {
    // The process has two lanes with two producers each, which are initialised once.
    let is_reached = |step: &str, time: u32| step != "initialise" || time <= 4;
    let mut crashes = 0;
    member.kill_9();
    for time in times {
        for step in STEPS_OF_A_TRANSACTION {
            if !is_reached(step, *time) {
                continue;
            }
            member.start_again_with(&[("REDELIVER_FAULT", &format!("{step}:{time}"))]);
            member.until_crashed();
            let logged = format!("fault injected: aborting name=\"{step}\" count={time}");
            assert!(member.output().contains(&logged), "{}", member.output());
            crashes += 1;
        }
    }
    member.start_again();
    member.until_ready();
    crashes
}

/// Crashes both services at each step, at the same time.
fn crash_both_at_each_step(name: &str, times: &[u32], expected: u32) {
    let _permit = ChaosPermit::acquire();
    let pipe = setup(name).create();
    let mut members = SERVICES.map(|service| pipe.start(service, "a", &[]));
    let sent = under_load(&pipe, 200, |load| {
        thread::scope(|scope| {
            for member in &mut members {
                scope.spawn(move || assert_eq!(crash_at_each_step(member, times), expected));
            }
        });
        load.until_ended(100);
    });
    settle(&pipe, &sent, &PLAN);
    for member in &members {
        println!("{member}");
        assert_eq!((member.crashes(), member.kills()), (expected, 1), "{member}");
    }
}

#[test]
fn crash_at_any_step_loses_nothing() {
    crash_both_at_each_step("steps", &[2], 7);
}

#[test]
#[ignore = "long"]
fn crashes_in_late_transactions_lose_nothing() {
    crash_both_at_each_step("all-steps", &[1, 3, 10, 40], 26);
}

/// One of two processes of each service is frozen for longer than its session, and the other one takes over.
#[test]
fn frozen_process_writes_nothing_after_takeover() {
    let (_permit, mut random) = chaos_with_permit("frozen");
    let pipe = setup("frozen").create();
    let mut pairs = SERVICES.map(|service| ["a", "b"].map(|instance| pipe.start(service, instance, &[])));
    let sent = under_load(&pipe, 150, |load| {
        for pair in &mut pairs {
            until_shared(pair, OWNED);
        }
        sleep_up_to(&mut random, Duration::from_millis(1_000));
        for [frozen, _] in &mut pairs {
            frozen.freeze();
        }
        for [_, other] in &mut pairs {
            other.until_owning(OWNED);
        }
        // The others do their work, including the records that wait in tiers.
        load.until_ended(200);
        for [frozen, _] in &mut pairs {
            frozen.thaw();
        }
        for pair in &mut pairs {
            until_shared(pair, OWNED);
        }
    });
    settle(&pipe, &sent, &PLAN);
    for [frozen, _] in &pairs {
        assert_eq!(frozen.freezes(), 1, "{frozen}");
    }
}

#[test]
fn rolling_restart_loses_and_duplicates_nothing() {
    let (_permit, mut random) = chaos_with_permit("rolling");
    let pipe = setup("rolling").create();
    let mut pairs = SERVICES.map(|service| ["a", "b"].map(|instance| pipe.start(service, instance, &[])));
    let sent = under_load(&pipe, 150, |load| {
        for pair in &mut pairs {
            until_shared(pair, OWNED);
        }
        for member in pairs.as_flattened_mut() {
            sleep_up_to(&mut random, Duration::from_millis(300));
            member.restart();
        }
        load.until_ended(50);
        for pair in &mut pairs {
            until_shared(pair, OWNED);
        }
    });
    settle(&pipe, &sent, &PLAN);
    for member in pairs.as_flattened() {
        println!("{member}");
        assert_eq!(member.shutdowns(), 1);
    }
}

/// One of two processes of each service ends and never returns.
#[test]
#[ignore = "long"]
fn another_process_takes_over_after_kill() {
    let (_permit, mut random) = chaos_with_permit("killed-for-good");
    let pipe = setup("killed-for-good").create();
    let mut pairs = SERVICES.map(|service| ["a", "b"].map(|instance| pipe.start(service, instance, &[])));
    let sent = under_load(&pipe, 150, |load| {
        for pair in &mut pairs {
            until_shared(pair, OWNED);
        }
        sleep_up_to(&mut random, Duration::from_millis(1_000));
        for [leaving, _] in &mut pairs {
            leaving.kill_9();
        }
        for [_, staying] in &mut pairs {
            staying.until_owning(OWNED);
        }
        load.until_ended(100);
    });
    settle(&pipe, &sent, &PLAN);
    for [left, _] in &pairs {
        assert_eq!(left.kills(), 1);
    }
}

/// A record that fails once fails always. So the number of attempts does not depend on how many calls were repeated
/// because the broker lost their results.
fn stubborn(fate: Fate) -> Fate {
    match fate {
        Fate::Recovers { .. } => Fate::Recovers {
            failures: u32::MAX,
            trouble: Trouble::Unavailable,
        },
        fate => fate,
    }
}

/// A pipeline whose endpoint never recovers from a transient failure.
fn stubborn_setup(name: &str, brokers: &str) -> PipeBuilder {
    setup(name)
        .brokers(brokers)
        .set("kafka.transaction_timeout", "5s")
        .behave(|request| match stubborn(PLAN.fate(&request.body)) {
            Fate::Succeeds => delayed(request, Reply::ok(request.body.clone())),
            Fate::Recovers { .. } => Reply::status(503),
            Fate::Refused => Reply::status(422),
        })
}

/// Waits until all records have ended. No attempt may be wasted, and no process may have ended.
#[track_caller]
fn settle_stubborn(pipe: &Pipe, sent: &[Sent], members: &mut [ServiceProcess]) {
    let ends = pipe.settle(sent, DEADLINE);
    ends.meets_with(sent, |sent| stubborn(PLAN.fate(sent.body())));
    assert!(
        ends.report.min_margin_ms.is_some_and(|margin| margin >= 0),
        "{}",
        ends.report
    );
    println!("{}", ends.report);
    for member in members {
        println!("{member}");
        assert!(member.has_never_ended(), "{member} did not wait");
    }
}

#[test]
#[ignore = "long"]
fn unresponsive_broker_wastes_no_attempts() {
    let (_permit, mut random) = chaos_with_permit("frozen-broker");
    // The controller freezes with the broker, and must not fence it afterwards.
    let kafka = LocalKafka::start_with(&[("broker.session.timeout.ms", "600000")]).unwrap();
    let pipe = stubborn_setup("frozen-broker", &kafka.brokers()).create();
    let mut members = SERVICES.map(|service| pipe.start(service, "a", &[]));
    let sent = under_load(&pipe, 150, |load| {
        for _ in 0..2 {
            load.until_ended(300);
            sleep_up_to(&mut random, Duration::from_millis(1_000));
            kafka.process().stop();
            for member in &mut members {
                member.until_not_ready("\"ready\":false");
            }
            kafka.process().cont();
            for member in &mut members {
                member.until_ready();
            }
        }
        load.until_ended(300);
    });
    settle_stubborn(&pipe, &sent, &mut members);
}

#[test]
#[ignore = "long"]
fn broker_loss_wastes_no_attempts() {
    let (_permit, mut random) = chaos_with_permit("two-brokers");
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let brokers = format!("{},{}", first.brokers(), second.brokers());
    let pipe = stubborn_setup("two-brokers", &brokers)
        .set("kafka.topics.replication", "2")
        .create();
    let mut members = SERVICES.map(|service| pipe.start(service, "a", &[]));
    let sent = under_load(&pipe, 150, |load| {
        for is_killed in [false, true] {
            until_second_broker_leads(&first);
            load.until_ended(300);
            sleep_up_to(&mut random, Duration::from_millis(1_000));
            if is_killed {
                second.kill_9();
            } else {
                second.stop().unwrap();
            }
            load.until_ended(300);
            second.start_again().unwrap();
        }
        load.until_ended(300);
    });
    settle_stubborn(&pipe, &sent, &mut members);
}

/// Two processes of a service run with the same instance name.
#[test]
fn second_enricher_of_name_fails() {
    let _permit = ChaosPermit::acquire();
    let pipe = setup("twins").create();
    let tier = pipe.retry_tier("a");
    let mut first = pipe.enricher("twin");
    let sent = under_load(&pipe, 150, |load| {
        load.until_ended(200);
        let mut second = pipe.spawn("enricher", "twin", &[]);
        let first_ends = eventually("one of two processes of one name ends", DEADLINE, || {
            match [first.is_running(), second.is_running()] {
                [false, _] => Ok(true),
                [_, false] => Ok(false),
                _ => Err(format!(
                    "both run:\n{}\n----\n{}",
                    first.output(),
                    second.output()
                )),
            }
        });
        let (ended, left) = if first_ends {
            (&mut first, &mut second)
        } else {
            (&mut second, &mut first)
        };
        let output = ended.output();
        assert_eq!(ended.wait(DEADLINE).code(), Some(1), "{output}");
        let complaint = format!("under the same name `{}-twin`", pipe.name());
        let line = output.lines().rfind(|line| line.contains(&complaint));
        let line = line.unwrap_or_else(|| panic!("nothing says {complaint:?}:\n{output}"));
        assert!(line.contains("instance: another process runs lane"), "{line}");
        // The other one continues, or ends for the same reason. An operator stops it and starts a single process.
        if left.is_running() {
            left.process().terminate();
        }
        let code = left.wait(DEADLINE).code();
        assert!(
            code == Some(0) || left.output().contains(&complaint),
            "{code:?}\n{}",
            left.output()
        );
        first.start_again();
        first.until_ready();
        load.until_ended(200);
    });
    settle(&pipe, &sent, &PLAN);
    assert!(tier.is_running());
}
