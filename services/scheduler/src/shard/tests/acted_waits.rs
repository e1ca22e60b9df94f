//! Acts on single long waits.

use redeliver_core::{ErrorClass, route};
use v1::LongWaitAction::{Dead, Retry};

use super::*;

const FAR: Duration = Duration::from_secs(86_400 * 30);

impl World {
    pub(super) fn act(&mut self, id: JobId, action: v1::LongWaitAction) -> String {
        let offset = self.ingest.len();
        self.send(ProtoCommand::ActOnLongWait(v1::ActOnLongWait {
            id: id.to_string(),
            action: action.into(),
            by: "token:ann".to_owned(),
            reason: "INC-17".to_owned(),
        }));
        offset.to_string()
    }

    /// Three records wait. Returns the job of the second one.
    fn with_waits() -> (Self, JobId) {
        let mut world = Self::new();
        for _ in 0..3 {
            world.send_wait(world.now.after(FAR));
        }
        world.run_turns(&[]);
        let second = world.ids[1];
        (world, second)
    }
}

#[test]
fn retried_wait_comes_back_once() {
    for lost in [&[][..], &[0], &[1], &[0, 1, 2]] {
        let (mut world, id) = World::with_waits();
        let first = world.act(id, Retry);
        world.run_turns(lost);
        let second = world.act(id, Retry);
        let third = world.act(id, Dead);
        world.run_turns(&[]);
        assert_eq!(world.returned(), [1], "{lost:?}");
        let outcomes = [first, second, third].map(|answer| world.answers[&answer].outcome());
        let dispatched = v1::Outcome::AlreadyDispatched;
        assert_eq!(outcomes, [v1::Outcome::Rescheduled, dispatched, dispatched]);
        let waiting = world.state.values();
        assert_eq!(
            waiting.filter(|job| job.state == JobState::Scheduled).count(),
            2,
            "the others wait as before"
        );
        assert!(world.dead_long_waits.is_empty());
    }
}

#[test]
fn given_up_wait_is_dead_letter() {
    for lost in [&[][..], &[0], &[1], &[0, 1, 2]] {
        let (mut world, id) = World::with_waits();
        let first = world.act(id, Dead);
        world.run_turns(lost);
        let second = world.act(id, Dead);
        let third = world.act(id, Retry);
        world.run_turns(&[]);
        let [dead] = &world.dead_long_waits[..] else {
            panic!("{:?}", world.dead_long_waits)
        };
        assert_eq!(
            (&*dead.topic, dead.value.as_deref()),
            ("docs-dlq", Some(&b"1"[..]))
        );
        let message = dead.headers.last(headers::ERROR_MESSAGE).unwrap();
        let message = std::str::from_utf8(message).unwrap();
        assert!(
            message.starts_with("token:ann has given up its retries (INC-17)"),
            "{message}"
        );
        let outcomes = [first, second, third].map(|answer| world.answers[&answer].outcome());
        let expired = v1::Outcome::Expired;
        assert_eq!(outcomes, [v1::Outcome::Dead, expired, expired], "{lost:?}");
        assert_eq!(world.job(id).unwrap().state, JobState::Expired);
        assert!(world.returned().is_empty());
    }
}

#[test]
fn given_up_waits_count_as_one_code() {
    let mut world = World::new();
    let mut failed = Headers::new();
    let failure = Failure::new(ErrorClass::Transient, "http.503", "busy");
    headers::write_failure(&mut failed, &failure, world.now);
    world.send(ProtoCommand::LongWait(v1::LongWait {
        pipeline: "docs".to_owned(),
        due: Some(to_timestamp(world.now.after(FAR))),
        headers: to_headers(&failed),
        ..v1::LongWait::default()
    }));
    let id = world.ids[0];
    world.act(id, Dead);
    world.run_turns(&[]);
    let [dead] = &world.dead_long_waits[..] else {
        panic!("{:?}", world.dead_long_waits)
    };
    assert_eq!(dead.headers.last(headers::ERROR_CODE), Some(&b"http.503"[..]));
    assert_eq!(world.settings.dead_letter_code(dead), Some(route::OPERATOR_DEAD));
}

#[test]
fn wait_without_dead_letter_topic_stays() {
    let (mut world, id) = World::with_waits();
    let lasting = Duration::from_secs(600);
    world.topics.set_of("docs-dlq", Presence::Missing { lasting });
    let refused = world.act(id, Dead);
    world.run_turns(&[]);
    assert_eq!(world.answers[&refused].outcome(), v1::Outcome::Rejected);
    assert_eq!(world.answers[&refused].code, TOPIC_MISSING);
    world.topics.set_of("docs-dlq", Presence::Exists);
    let done = world.act(id, Dead);
    world.run_turns(&[]);
    assert_eq!(world.answers[&done].outcome(), v1::Outcome::Dead);
}

#[test]
fn only_long_waits_are_acted_on() {
    let mut world = World::new();
    let job = world.schedule("app", 60_000, None);
    let answers = [world.act(job, Retry), world.act(job, Dead)];
    let never = JobId::new(world.now, 0, 999);
    let of_none = world.act(never, Retry);
    world.run_turns(&[]);
    for answer in answers.iter().chain([&of_none]) {
        assert_eq!(world.answers[answer].outcome(), v1::Outcome::Unknown);
    }
    assert_eq!(world.job(job).unwrap().state, JobState::Scheduled);
}
