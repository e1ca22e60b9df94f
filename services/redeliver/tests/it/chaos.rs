//! Kill tests: the real binaries under load while they are killed, frozen, restarted, doubled and cut off from
//! Kafka. After each the oracle must find every record once, at its place, not early and not altered (I1, I2,
//! I3), and each test counts what it did, since a run that killed nothing proves nothing.
//!
//! [`load`] has the records that keep coming until the chaos is over.
//!
//! Random choices follow a seed, which is printed; `REDELIVER_CHAOS_SEED` sets it.

mod load;

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_audit::Report;
use redeliver_testkit::local_kafka::kafka_tool;
use redeliver_testkit::{Fate, LocalKafka, Plan, Reply, Request, ServiceProcess, Trouble, eventually};

use crate::support::{Pipe, Sent, Setup};
use load::under_load;

/// Three of ten records fail once or twice, two of a hundred for good.
const PLAN: Plan = Plan {
    transient_percent: 30,
    permanent_percent: 2,
    hang_per_mille: 0,
    close_per_mille: 0,
    latency: Duration::ZERO,
};
/// Partitions of each topic of a pipeline.
const PARTITIONS: u32 = 4;
/// What the members of each of both services own together: the enrichers read the source and the due topic,
/// the retry tiers the topics of two tiers.
const OWNED: u64 = 2 * PARTITIONS as u64;
/// How long the rest may take once the chaos is over, on a machine that is busy with another such test.
const REST: Duration = Duration::from_secs(90);
/// How long a change of members may take, a session timeout included.
const CHANGE: Duration = Duration::from_secs(60);
const SERVICES: [&str; 2] = ["enricher", "retry-tier"];

/// The shortest session timeout that the configuration allows.
const SESSION: Duration = Duration::from_secs(6);

fn setup(name: &str) -> Setup {
    Setup::new(&format!("chaos-{name}"))
        .partitions(PARTITIONS)
        .tiers(&[1_000, 2_000])
        .set("kafka.static_membership", "true")
        .set("kafka.session_timeout", &format!("{}s", SESSION.as_secs()))
        // A call that a frozen or starved process has not followed up must not count as a failure.
        .pipeline("http.timeout", "60s")
        .behave(|request| late(request, PLAN.reply(request)))
}

/// Successes take 0 to 5 ms, others no time.
fn late(request: &Request, reply: Reply) -> Reply {
    let millis = request.body.iter().map(|byte| u64::from(*byte)).sum::<u64>() % 6;
    match reply {
        Reply::Status(200, ..) => Reply::Delay(Duration::from_millis(millis), Box::new(reply)),
        other => other,
    }
}

/// The seed of this run, printed.
fn random(test: &str) -> fastrand::Rng {
    let seed = std::env::var("REDELIVER_CHAOS_SEED").ok();
    let seed = seed.map_or_else(
        || fastrand::u64(..1_000_000_000),
        |text| text.parse().expect("REDELIVER_CHAOS_SEED is a number"),
    );
    println!("{test}: REDELIVER_CHAOS_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// Lets a random moment come.
fn let_pass(random: &mut fastrand::Rng, most: Duration) {
    thread::sleep(most.mul_f64(random.f64()));
}

/// Leave to run a test: only two do at a time, since processes that get no processor look like dead ones.
struct Turn;

static RUNNING: Mutex<u32> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

impl Turn {
    fn wait() -> Self {
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = ENDED
            .wait_while(running, |running| *running >= 2)
            .unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDED.notify_one();
    }
}

/// A process of a pipeline that has just been started.
fn spawn<'a>(pipe: &'a Pipe, service: &'static str, instance: &'static str) -> ServiceProcess<'a> {
    let name = format!("{service} {instance}");
    ServiceProcess::spawn(name, move |_| pipe.spawn(service, instance, &[]).process)
}

/// A process of a pipeline that is ready.
#[track_caller]
fn start<'a>(pipe: &'a Pipe, service: &'static str, instance: &'static str) -> ServiceProcess<'a> {
    let mut member = spawn(pipe, service, instance);
    member.until_ready();
    member
}

/// Waits until all records have ended and nothing is waiting any more.
#[track_caller]
fn rest(pipe: &Pipe, sent: &[Sent]) -> Box<Report> {
    let count = sent.len() as u64;
    let mut watch = pipe.watch();
    let began = Instant::now();
    eventually("nothing is waiting", REST, || {
        let ended = watch.look().len();
        // An audit is dear, so it is only asked when it may say yes, or when it is the last word.
        if ended < sent.len() && began.elapsed() < REST.mul_f64(0.95) {
            return Err(format!("{ended} of {count} records have ended"));
        }
        let report = pipe.audit();
        assert!(report.is_clean(), "{report}");
        if report.waiting.total() == 0 && report.output + report.dead >= count {
            Ok(report)
        } else {
            Err(report.to_string())
        }
    })
}

/// Once nothing is waiting, every record is where its fate says, none twice, early or altered.
#[track_caller]
fn verdict(pipe: &Pipe, sent: &[Sent], plan: &Plan) -> Box<Report> {
    let count = sent.len() as u64;
    let report = rest(pipe, sent);
    assert!(report.is_clean(), "{report}");
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
    // A call whose answer was lost with its process is made again, so there may be fewer failures than planned
    // but never more.
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

/// Kills a member so many times, three of four times once it is ready, else at any moment of its start, and
/// starts it again at once.
fn kill_and_start_again(member: &mut ServiceProcess<'_>, kills: u32, mut random: fastrand::Rng) {
    for kill in 0..kills {
        if kill % 2 == 0 || random.bool() {
            member.until_ready();
            let_pass(&mut random, Duration::from_millis(1_000));
        } else {
            let_pass(&mut random, Duration::from_millis(2_000));
        }
        member.kill_9();
        member.start_again();
    }
    member.until_ready();
}

/// Both services are killed again and again, at the same time.
fn both_are_killed<'a>(
    pipe: &'a Pipe,
    kills: u32,
    per_second: u32,
    random: &mut fastrand::Rng,
) -> [ServiceProcess<'a>; 2] {
    let mut members = SERVICES.map(|service| start(pipe, service, "a"));
    let sent = under_load(pipe, per_second, |load| {
        thread::scope(|scope| {
            for member in &mut members {
                let random = random.fork();
                scope.spawn(move || kill_and_start_again(member, kills, random));
            }
        });
        load.until_ended(100);
    });
    verdict(pipe, &sent, &PLAN);
    for member in &members {
        println!("{member}");
        assert_eq!(member.kills(), kills);
        assert!(
            member.kills_at_work() * 2 >= kills,
            "only {} of {kills} kills hit one that was ready: {member}",
            member.kills_at_work(),
        );
    }
    members
}

#[test]
fn nothing_is_lost_or_doubled_by_kills_at_random_moments() {
    let _turn = Turn::wait();
    let mut random = random("kills");
    let pipe = setup("kills").create();
    let members = both_are_killed(&pipe, 20, 320, &mut random);
    for member in &members {
        // That is what the stable name is for: without it each restart waits for the dead member's session.
        assert!(member.median_until_ready() < SESSION / 2, "{member}");
    }
}

#[test]
fn nothing_is_lost_or_doubled_by_kills_without_static_membership() {
    let _turn = Turn::wait();
    let mut random = random("dynamic");
    let pipe = setup("dynamic").set("kafka.static_membership", "false").create();
    both_are_killed(&pipe, 4, 120, &mut random);
}

/// Of two members of each service one is frozen for longer than its session, while the other takes over.
fn frozen_members_come_back(name: &str, static_membership: &str) {
    const ROUNDS: usize = 2;
    let _turn = Turn::wait();
    let mut random = random(name);
    let pipe = setup(name)
        .set("kafka.static_membership", static_membership)
        .create();
    let mut pairs = SERVICES.map(|service| ["a", "b"].map(|instance| start(&pipe, service, instance)));
    let sent = under_load(&pipe, 150, |load| {
        for round in 0..ROUNDS {
            for pair in &mut pairs {
                until_shared(pair);
            }
            let_pass(&mut random, Duration::from_millis(1_000));
            for pair in &mut pairs {
                pair[round % 2].freeze();
            }
            for pair in &mut pairs {
                pair[(round + 1) % 2].until_owning(OWNED);
            }
            // The other ones do their work, the waits in the tiers included.
            load.until_ended(200);
            for pair in &mut pairs {
                pair[round % 2].thaw();
            }
        }
        for pair in &mut pairs {
            until_shared(pair);
        }
    });
    verdict(&pipe, &sent, &PLAN);
    for member in pairs.as_flattened() {
        println!("{member}");
        assert_eq!(member.freezes(), 1);
    }
}

#[test]
fn a_frozen_process_that_comes_back_writes_nothing_of_what_another_has_taken_over() {
    frozen_members_come_back("frozen", "true");
}

#[test]
fn a_frozen_process_without_static_membership_writes_nothing_of_what_another_has_taken_over() {
    frozen_members_come_back("frozen-dynamic", "false");
}

/// Waits until both own some partitions, all of them together, none of them twice.
#[track_caller]
fn until_shared(pair: &mut [ServiceProcess<'_>; 2]) {
    let what = format!("{} and {} own partitions", pair[0].name(), pair[1].name());
    eventually(&what, CHANGE, || {
        let owned = pair.each_mut().map(|member| member.owned());
        if owned.iter().all(|owned| *owned > 0) && owned.iter().sum::<u64>() == OWNED {
            Ok(())
        } else {
            Err(format!("{owned:?} of {OWNED}"))
        }
    });
}

#[test]
fn rolling_restarts_lose_and_double_nothing() {
    const ROUNDS: u32 = 3;
    let _turn = Turn::wait();
    let mut random = random("rolling");
    let pipe = setup("rolling").create();
    let mut pairs = SERVICES.map(|service| ["a", "b"].map(|instance| start(&pipe, service, instance)));
    let sent = under_load(&pipe, 150, |load| {
        for pair in &mut pairs {
            until_shared(pair);
        }
        for _ in 0..ROUNDS {
            for member in pairs.as_flattened_mut() {
                let_pass(&mut random, Duration::from_millis(300));
                member.end_in_order();
                member.start_again();
                member.until_ready();
            }
            load.until_ended(50);
        }
        for pair in &mut pairs {
            until_shared(pair);
        }
    });
    verdict(&pipe, &sent, &PLAN);
    for member in pairs.as_flattened() {
        println!("{member}");
        assert_eq!(member.ends(), ROUNDS);
    }
}

/// Of two members of each service one goes and never comes back.
fn one_leaves_for_good(name: &str, leave: fn(&mut ServiceProcess<'_>)) {
    let _turn = Turn::wait();
    let mut random = random(name);
    let pipe = setup(name).create();
    let mut pairs = SERVICES.map(|service| ["a", "b"].map(|instance| start(&pipe, service, instance)));
    let sent = under_load(&pipe, 150, |load| {
        for pair in &mut pairs {
            until_shared(pair);
        }
        let_pass(&mut random, Duration::from_millis(1_000));
        for [leaving, _] in &mut pairs {
            leave(leaving);
        }
        for [_, staying] in &mut pairs {
            staying.until_owning(OWNED);
        }
        load.until_ended(100);
    });
    verdict(&pipe, &sent, &PLAN);
    for [left, _] in &pairs {
        assert_eq!(left.kills() + left.ends(), 1);
    }
}

#[test]
fn a_process_that_ends_for_good_leaves_its_records_to_the_other() {
    one_leaves_for_good("leave", |member| member.end_in_order());
}

#[test]
fn a_process_that_is_killed_for_good_leaves_its_records_to_the_other() {
    one_leaves_for_good("killed-for-good", |member| member.kill_9());
}

/// All that fails keeps failing, so that the number of attempts does not depend on how many calls were made
/// again because the broker lost their results.
fn stubborn(fate: Fate) -> Fate {
    match fate {
        Fate::Recovers { .. } => Fate::Recovers {
            failures: u32::MAX,
            trouble: Trouble::Unavailable,
        },
        fate => fate,
    }
}

/// A pipeline whose endpoint fails for ever what fails for the moment.
fn stubborn_setup(name: &str, brokers: &str) -> Setup {
    setup(name)
        .brokers(brokers)
        .set("kafka.transaction_timeout", "5s")
        .behave(|request| match stubborn(PLAN.fate(&request.body)) {
            Fate::Succeeds => late(request, Reply::ok(request.body.clone())),
            Fate::Recovers { .. } => Reply::status(503),
            Fate::Refused => Reply::status(422),
        })
}

/// Waits for the end of it all; no attempt must have been burnt, and nobody have died of it.
#[track_caller]
fn stubborn_verdict(pipe: &Pipe, sent: &[Sent], members: &mut [ServiceProcess<'_>]) {
    rest(pipe, sent);
    let ends = pipe.settle(sent, REST);
    ends.meets_with(sent, |sent| stubborn(PLAN.fate(sent.body())));
    assert!(
        ends.report.min_margin_ms.is_some_and(|margin| margin >= 0),
        "{}",
        ends.report
    );
    println!("{}", ends.report);
    for member in members {
        println!("{member}");
        assert!(member.is_in_its_first_life(), "{member} did not wait");
    }
}

#[test]
#[ignore = "long"]
fn services_wait_for_a_broker_that_does_not_answer_and_burn_no_attempts() {
    let _turn = Turn::wait();
    let mut random = random("frozen-broker");
    // The controller is frozen too, and must not hold the time against the broker.
    let kafka = LocalKafka::start_with(&[("broker.session.timeout.ms", "600000")]).unwrap();
    let pipe = stubborn_setup("frozen-broker", &kafka.brokers()).create();
    let mut members = SERVICES.map(|service| start(&pipe, service, "a"));
    let sent = under_load(&pipe, 150, |load| {
        for _ in 0..2 {
            load.until_ended(300);
            let_pass(&mut random, Duration::from_millis(1_000));
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
    stubborn_verdict(&pipe, &sent, &mut members);
}

#[test]
#[ignore = "long"]
fn services_go_on_when_one_of_two_brokers_restarts_or_is_killed_and_burn_no_attempts() {
    let _turn = Turn::wait();
    let mut random = random("two-brokers");
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let brokers = format!("{},{}", first.brokers(), second.brokers());
    let pipe = stubborn_setup("two-brokers", &brokers)
        .set("kafka.topics.replication", "2")
        .create();
    let mut members = SERVICES.map(|service| start(&pipe, service, "a"));
    let sent = under_load(&pipe, 150, |load| {
        for is_killed in [false, true] {
            eventually("the second broker leads its part", CHANGE, || {
                let described = describe(&first);
                if described.contains("Leader: 2") {
                    Ok(())
                } else {
                    Err(described)
                }
            });
            load.until_ended(300);
            let_pass(&mut random, Duration::from_millis(1_000));
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
    stubborn_verdict(&pipe, &sent, &mut members);
}

/// Where the partitions of all topics are led, as Kafka's own tool says.
fn describe(kafka: &LocalKafka) -> String {
    let mut tool = kafka_tool("org.apache.kafka.tools.TopicCommand").unwrap();
    tool.args(["--bootstrap-server", &kafka.brokers(), "--describe"]);
    String::from_utf8(tool.output().unwrap().stdout).unwrap()
}

/// Two processes of a service run under one name.
fn two_of_one_name(service: &'static str) {
    let _turn = Turn::wait();
    let name = format!("twins-{service}");
    let pipe = setup(&name).create();
    let other = SERVICES[usize::from(service == SERVICES[0])];
    let other = start(&pipe, other, "a");
    let mut first = start(&pipe, service, "twin");
    let sent = under_load(&pipe, 150, |load| {
        load.until_ended(200);
        let mut second = spawn(&pipe, service, "twin");
        let ended = first_to_end(&mut first, &mut second);
        assert_eq!(ended.code, Some(1), "{}", ended.output);
        let complaint = format!("under the same name `{}-twin`", pipe.name);
        let line = ended.output.lines().rfind(|line| line.contains(&complaint));
        let line = line.unwrap_or_else(|| panic!("nothing says {complaint:?}:\n{}", ended.output));
        assert!(line.contains("instance: another process runs lane"), "{line}");
        // The other one goes on, or ends for the same reason. Somebody notices, ends it, and starts one process.
        let left = if first.is_running() {
            &mut first
        } else {
            &mut second
        };
        if left.is_running() {
            left.life().terminate();
        }
        let code = left.life().wait(CHANGE).code();
        assert!(
            code == Some(0) || left.output().contains(&complaint),
            "{code:?}\n{}",
            left.output()
        );
        first.start_again();
        first.until_ready();
        load.until_ended(200);
    });
    verdict(&pipe, &sent, &PLAN);
    assert!(other.is_running());
}

struct Ended {
    code: Option<i32>,
    output: String,
}

/// Waits until one of both has ended by itself.
fn first_to_end<'a>(first: &mut ServiceProcess<'a>, second: &mut ServiceProcess<'a>) -> Ended {
    let index = eventually("one of two processes of one name ends", CHANGE, || {
        match [first.is_running(), second.is_running()] {
            [false, _] => Ok(0),
            [_, false] => Ok(1),
            _ => Err(format!(
                "both run:\n{}\n----\n{}",
                first.output(),
                second.output()
            )),
        }
    });
    let ended = if index == 0 { first } else { second };
    Ended {
        code: ended.life().wait(CHANGE).code(),
        output: ended.output(),
    }
}

#[test]
fn two_enrichers_of_one_name_end_with_an_error_that_names_it() {
    two_of_one_name("enricher");
}

#[test]
fn two_retry_tiers_of_one_name_end_with_an_error_that_names_it() {
    two_of_one_name("retry-tier");
}
