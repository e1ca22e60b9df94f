//! From surveys to what callers see.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::backoff::Jitter;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{HumanDuration, Pipeline, RetryPolicy, Timestamp};
use redeliver_kafka::TopicId;
use redeliver_kafka::backlog::Backlog;
use redeliver_proto::convert::{from_timestamp, to_timestamp};
use redeliver_proto::{Message as _, v1};
use redeliver_service::control::value::{Desired, PipelineControl, Run, TierControl, Value};
use redeliver_service::control::{ControlName, Snapshot};
use redeliver_service::queues::{Queue, Waiting};
use v1::{NextStep, ProblemKind};

use super::history::History;
use super::pipelines::Pipelines;
use super::survey::{Letters, Open, Reading, Redrive, RedriveState, Survey, TopicEnd, Topics};
use super::view::{Caller, Overview, Selection, digest};
use crate::completeness::Completeness;
use crate::fingerprint::GroupId;
use crate::group_states::GroupState;
use crate::index::TopicGroup;

const NOW: i64 = 1_000_000_000;
const TIER: HumanDuration = HumanDuration::from_secs(30);
const ALL: Selection = Selection {
    pipeline: String::new(),
    prefix: String::new(),
    is_by_name: false,
    after: String::new(),
    limit: 100,
    problem_limit: 100,
};

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(millis)
}

fn pipeline(name: &str) -> Pipeline {
    Pipeline {
        output: Some(format!("{name}-out").into()),
        policy: RetryPolicy::listed(vec![TIER], None, Jitter::None).unwrap(),
        ..Pipeline::new(name)
    }
}

fn pipelines(names: &[&str]) -> Pipelines {
    Pipelines::new(names.iter().map(|name| pipeline(name)).collect())
}

/// Everything is known, and nothing is wrong.
fn survey(pipelines: &Pipelines, number: u64) -> Survey {
    let end = TopicEnd {
        id: Some(TopicId::from_bits(1)),
        offsets: 0,
        partitions: 2,
        is_whole: true,
    };
    let ends = pipelines.needed.iter().map(|topic| (topic.clone(), end));
    Survey {
        number,
        at: at(NOW),
        uptime: Duration::from_secs(number),
        topics: Some(Arc::new(Topics {
            ends: ends.collect(),
            refused: BTreeSet::new(),
        })),
        waiting: Some(Arc::new(Reading {
            at: at(NOW),
            groups: 0,
            queues: BTreeMap::new(),
        })),
        letters: Some(Arc::new(Letters {
            has_states: true,
            groups: Some(Vec::new()),
            completeness: Completeness {
                as_of: Some(at(NOW)),
                ..Completeness::default()
            },
            ..Letters::default()
        })),
        controls: Some(Arc::default()),
        redrives: Some(Vec::new()),
        breakers: Some(BTreeMap::new()),
        audits: BTreeMap::new(),
        incomplete: BTreeMap::new(),
    }
}

fn topics(survey: &mut Survey) -> &mut Topics {
    Arc::get_mut(survey.topics.as_mut().unwrap()).unwrap()
}

fn letters(survey: &mut Survey) -> &mut Letters {
    Arc::get_mut(survey.letters.as_mut().unwrap()).unwrap()
}

fn queue(survey: &mut Survey, pipeline: &str, topic: &str, role: TopicRole, waiting: Waiting) {
    let queue = Queue {
        pipeline: Some(pipeline.into()),
        is_configured: true,
        topic: topic.into(),
        role,
        group: String::new(),
    };
    let reading = Arc::get_mut(survey.waiting.as_mut().unwrap()).unwrap();
    let queues = reading.queues.entry(pipeline.into()).or_default();
    queues.push((queue, waiting));
}

/// Records of `a` wait in its tier.
fn in_tier(survey: &mut Survey, waiting: Waiting) {
    queue(survey, "a", "a-retry-30s", TopicRole::Tier(TIER), waiting);
}

fn removed_in_hours(survey: &mut Survey, hours: i64) {
    let open = Open {
        count: 5,
        oldest: at(0),
        removed_from: Some(at(NOW + hours * 3_600_000)),
    };
    letters(survey).open.insert("a-dlq".to_owned(), open);
}

fn backlog(records: u64, due: Option<&[i64]>) -> Waiting {
    Waiting {
        backlog: Backlog {
            records,
            is_exact: true,
        },
        unreachable: Vec::new(),
        due: due.map(|due| due.iter().copied().map(at).collect()),
    }
}

/// Sees these topics and controls; `*`: all.
struct Sees<'s>(&'s [&'s str]);

impl Caller for Sees<'_> {
    fn sees(&self, topic: &str) -> bool {
        self.0.contains(&"*") || self.0.contains(&topic)
    }

    fn sees_control(&self, control: &str) -> bool {
        self.0.contains(&"*") || self.0.contains(&control)
    }

    fn lacks_codes(&self, _topic: &str) -> bool {
        self.0.contains(&"without codes")
    }
}

/// What a caller who sees everything gets.
fn seen(pipelines: &Pipelines, surveys: &[Survey]) -> v1::Overview {
    shown(pipelines, surveys).view(&Sees(&["*"]), &ALL)
}

fn since(problem: &v1::Problem) -> Option<Timestamp> {
    problem.since.as_ref().and_then(from_timestamp)
}

fn names(view: &v1::Overview) -> Vec<&str> {
    view.pipelines.iter().map(|row| &*row.pipeline).collect()
}

fn kinds(view: &v1::Overview) -> Vec<ProblemKind> {
    view.problems.iter().map(v1::Problem::kind).collect()
}

/// An overview of surveys, the last of which is shown.
fn shown(pipelines: &Pipelines, surveys: &[Survey]) -> Overview {
    let mut history = History::default();
    let mut shown = None;
    for survey in surveys {
        let asked = history.ask(usize::MAX);
        history.note(survey, pipelines.needed.iter(), &asked);
        shown = Some(Overview::of(pipelines, survey, &history));
        history.add(survey);
    }
    shown.unwrap()
}

/// An empty overview with this number.
pub(super) fn overview(number: u64) -> Overview {
    let pipelines = pipelines(&[]);
    shown(&pipelines, &[survey(&pipelines, number)])
}

#[test]
fn quiet_system_has_no_problems() {
    let pipelines = pipelines(&["b", "a"]);
    let view = seen(&pipelines, &[survey(&pipelines, 1)]);
    assert!(view.problems.is_empty() && view.completeness.as_ref().unwrap().complete);
    assert_eq!((names(&view), view.pipeline_count), (vec!["a", "b"], 2));
    let row = &view.pipelines[0];
    let places: Vec<&str> = row.waiting.iter().map(|place| &*place.place).collect();
    assert_eq!(places, ["due", "30s"]);
    assert_eq!(row.dead_letters.as_ref().unwrap().open, Some(0));
    assert_eq!(row.run.as_ref().unwrap().paused, Some(false));
    // Two surveys are needed.
    assert_eq!(row.rates, None);
    // No worker tells it.
    assert_eq!(row.breaker(), v1::BreakerState::Unspecified);
    assert!(view.incomplete.is_empty());
}

#[test]
fn open_breaker_is_a_problem() {
    let pipelines = pipelines(&["a", "b", "c"]);
    let breaker = |state: v1::BreakerState| v1::BreakerStatus {
        state: state.into(),
        since: Some(to_timestamp(at(NOW - 5_000))),
        error_code: "http.503".to_owned(),
        expires: None,
    };
    let states = [
        v1::BreakerState::Closed,
        v1::BreakerState::Open,
        v1::BreakerState::HalfOpen,
    ];
    let breakers = ["a", "b", "c"]
        .map(str::to_owned)
        .into_iter()
        .zip(states.map(breaker));
    let known = Survey {
        breakers: Some(breakers.collect()),
        ..survey(&pipelines, 1)
    };
    let overview = shown(&pipelines, &[known]);
    let is_by_name = true;
    let view = overview.view(&Sees(&["*"]), &Selection { is_by_name, ..ALL });
    let shown_states: Vec<_> = view.pipelines.iter().map(v1::PipelineOverview::breaker).collect();
    assert_eq!(shown_states, states);
    let problems: Vec<&str> = view.problems.iter().map(|problem| &*problem.pipeline).collect();
    assert_eq!(problems, ["b"], "the endpoint of c has answered");
    let masked = overview.view(&Sees(&["*", "without codes"]), &ALL);
    assert_eq!(masked.problems[0].error_code, "");
    let problem = &view.problems[0];
    assert_eq!(
        (problem.kind(), problem.next_step(), &*problem.error_code),
        (ProblemKind::BreakerOpen, NextStep::CheckEndpoint, "http.503")
    );
    assert_eq!(since(problem), Some(at(NOW - 5_000)));

    // Without the topic, that is no problem.
    let unknown = Survey {
        breakers: None,
        ..survey(&pipelines, 1)
    };
    let view = seen(&pipelines, &[unknown]);
    assert_eq!(view.pipelines[0].breaker(), v1::BreakerState::Unspecified);
    assert_eq!(view.incomplete[0].part(), v1::OverviewPart::Breakers);
    assert!(view.problems.is_empty());
}

#[test]
fn unknown_parts_are_not_set() {
    let pipelines = pipelines(&["a"]);
    let unknown = Survey {
        topics: None,
        waiting: None,
        letters: None,
        controls: None,
        redrives: None,
        breakers: None,
        incomplete: [
            (v1::OverviewPart::Topics, "no answer"),
            (v1::OverviewPart::Waiting, "no answer"),
        ]
        .into(),
        ..survey(&pipelines, 1)
    };
    let later = Survey {
        at: at(NOW + 5_000),
        topics: None,
        waiting: None,
        incomplete: unknown.incomplete.clone(),
        ..survey(&pipelines, 2)
    };
    let view = seen(&pipelines, &[unknown]);
    let row = &view.pipelines[0];
    assert_eq!(row.lag.as_ref().unwrap().records, None);
    assert!(
        row.waiting
            .iter()
            .all(|place| place.waiting.as_ref().unwrap().records.is_none())
    );
    assert!(row.rates.is_none() && row.dead_letters.is_none() && row.missing_topics.is_empty());
    assert_eq!(row.run.as_ref().unwrap().paused, None);
    assert!(!view.completeness.unwrap().complete && view.waiting_as_of.is_none());

    let unknown = Survey {
        incomplete: later.incomplete.clone(),
        ..survey(&pipelines, 1)
    };
    let view = seen(&pipelines, &[unknown, later]);
    let problem = |problem: &v1::Problem| (problem.kind(), problem.part(), since(problem));
    let problems: Vec<_> = view.problems.iter().map(problem).collect();
    let expected = [v1::OverviewPart::Topics, v1::OverviewPart::Waiting];
    assert_eq!(
        problems,
        expected.map(|part| (ProblemKind::Incomplete, part, Some(at(NOW))))
    );
}

#[test]
fn rates_are_differences_of_ends() {
    let pipelines = pipelines(&["a"]);
    let end = |offsets, partitions, is_whole| TopicEnd {
        id: None,
        offsets,
        partitions,
        is_whole,
    };
    let with_id = |bits, offsets| TopicEnd {
        id: Some(TopicId::from_bits(bits)),
        ..end(offsets, 2, true)
    };
    for (before, now, expected) in [
        (Some(end(100, 2, true)), Some(end(150, 2, true)), Some(10.0)),
        (Some(end(100, 2, true)), Some(end(100, 2, true)), Some(0.0)),
        // A partition was added.
        (Some(end(100, 2, true)), Some(end(105, 3, true)), Some(1.0)),
        // A leader does not answer.
        (Some(end(100, 2, true)), Some(end(150, 2, false)), None),
        (Some(end(100, 2, false)), Some(end(150, 2, true)), None),
        // The topic was created again.
        (Some(end(100, 2, true)), Some(end(50, 2, true)), None),
        (Some(end(100, 2, true)), Some(end(150, 1, true)), None),
        (Some(with_id(1, 100)), Some(with_id(1, 150)), Some(10.0)),
        (Some(with_id(1, 100)), Some(with_id(2, 150)), None),
        (None, Some(end(150, 2, true)), None),
        (Some(end(100, 2, true)), None, None),
    ] {
        let of = |number, end: Option<TopicEnd>| {
            let mut survey = survey(&pipelines, number);
            let ends = &mut topics(&mut survey).ends;
            for topic in ["a", "a-out", "a-retry-30s", "a-dlq"] {
                ends.remove(topic);
                ends.extend(end.map(|end| (topic.into(), end)));
            }
            survey
        };
        let view = seen(&pipelines, &[of(1, before), of(6, now)]);
        let rates = view.pipelines[0].rates.unwrap();
        for rate in [rates.received, rates.succeeded, rates.retried, rates.dead] {
            assert_eq!(rate, expected, "{before:?} {now:?}");
        }
        assert_eq!(rates.window.unwrap().seconds, 5);
    }
}

#[test]
fn shared_output_has_no_rate() {
    let with_output = |name: &str, output: Option<&str>| Pipeline {
        output: output.map(Into::into),
        ..pipeline(name)
    };
    let pipelines = Pipelines::new(vec![
        with_output("a", Some("out")),
        with_output("b", Some("out")),
        with_output("c", Some("own")),
        with_output("d", None),
    ]);
    let surveys = [survey(&pipelines, 1), survey(&pipelines, 6)];
    let view = seen(&pipelines, &surveys);
    let succeeded = view.pipelines.iter().map(|row| row.rates.unwrap().succeeded);
    assert_eq!(succeeded.collect::<Vec<_>>(), [None, None, Some(0.0), None]);
}

#[test]
fn rates_are_of_newest_window() {
    let pipelines = pipelines(&["a"]);
    let surveys: Vec<Survey> = (1..=60)
        .map(|number| {
            let mut survey = survey(&pipelines, number);
            let source = topics(&mut survey).ends.get_mut("a").unwrap();
            // It doubles its rate.
            source.offsets = if number < 40 { 0 } else { 7 * number.cast_signed() };
            survey
        })
        .collect();
    let view = seen(&pipelines, &surveys);
    let rates = view.pipelines[0].rates.as_ref().unwrap();
    assert_eq!(rates.received, Some(7.0));
    assert!((10..14).contains(&rates.window.as_ref().unwrap().seconds));
}

#[test]
fn rates_are_not_of_old_surveys() {
    let pipelines = pipelines(&["a"]);
    let window = |uptimes: &[u64]| {
        let surveys: Vec<Survey> = uptimes.iter().map(|uptime| survey(&pipelines, *uptime)).collect();
        let view = seen(&pipelines, &surveys);
        let rates = view.pipelines[0].rates?;
        rates.window.map(|window| window.seconds)
    };
    assert_eq!(window(&[1, 61]), Some(60));
    assert_eq!(window(&[1, 62]), None);
    // After a gap, they begin again.
    assert_eq!(window(&[1, 4, 100]), None);
    assert_eq!(window(&[1, 4, 100, 103]), Some(3));
}

fn group(state: GroupState, last: i64) -> TopicGroup {
    TopicGroup {
        id: GroupId::from_number(7),
        topic: "a-dlq".to_owned(),
        state,
        first: at(NOW - 7_200_000),
        last: at(last),
        open: 3,
        error_class: "permanent".to_owned(),
        error_code: "http.404".to_owned(),
        template: "x".repeat(1_000),
    }
}

fn control(desired: Desired, changed_at: i64) -> Value {
    Value {
        revision: 1,
        changed_at: Some(at(changed_at)),
        changed_by: "token:ann".to_owned(),
        reason: "outage".to_owned(),
        change_id: bytes::Bytes::new(),
        desired,
    }
}

const PAUSED_PIPELINE: Desired = Desired::Pipeline(PipelineControl {
    run: Some(Run::Paused),
    rate: None,
});
const PAUSED_TIER: Desired = Desired::Tier(TierControl {
    run: Some(Run::Paused),
    rate: None,
    release: None,
});

fn controls(values: &[(&str, Desired, i64)]) -> Option<Arc<Snapshot>> {
    let mut snapshot = Snapshot::default();
    for (name, desired, changed_at) in values {
        let name: ControlName = name.parse().unwrap();
        snapshot.table.insert(name, control(desired.clone(), *changed_at));
    }
    Some(Arc::new(snapshot))
}

#[test]
fn problems_have_next_steps() {
    type Change = fn(&mut Survey);
    type Expected = Option<(ProblemKind, NextStep, Option<bool>)>;
    let cases: [(Change, Expected); 14] = [
        (
            |survey| topics(survey).ends.retain(|topic, _| &**topic != "a-out"),
            Some((ProblemKind::TopicMissing, NextStep::CreateTopic, None)),
        ),
        // It may exist.
        (
            |survey| {
                topics(survey).ends.remove("a-out");
                topics(survey).refused.insert("a-out".into());
            },
            None,
        ),
        (
            |survey| removed_in_hours(survey, 23),
            Some((
                ProblemKind::LettersExpire,
                NextStep::HandleDeadLetters,
                Some(true),
            )),
        ),
        (|survey| removed_in_hours(survey, 25), None),
        (
            |survey| in_tier(survey, backlog(2, Some(&[NOW - 61_000, NOW + 5_000]))),
            Some((ProblemKind::Overdue, NextStep::CheckRetryTier, None)),
        ),
        (|survey| in_tier(survey, backlog(2, Some(&[NOW - 59_000]))), None),
        // What is paused is not overdue.
        (
            |survey| {
                in_tier(survey, backlog(2, Some(&[NOW - 61_000])));
                survey.controls = controls(&[("tier/30s", PAUSED_TIER, NOW)]);
            },
            None,
        ),
        // It may be paused.
        (
            |survey| {
                in_tier(survey, backlog(2, Some(&[NOW - 61_000])));
                survey.controls = None;
            },
            None,
        ),
        (
            |survey| {
                survey.redrives = Some(vec![Redrive {
                    id: "1f".to_owned(),
                    sources: vec!["a-dlq".into()],
                    state: RedriveState::AutoPaused,
                    sent_at: Some(at(NOW)),
                    returned: 12,
                    by: "token:ann".to_owned(),
                }]);
            },
            Some((ProblemKind::RedriveAutoPaused, NextStep::ReviewRedrive, None)),
        ),
        (
            |survey| letters(survey).groups = Some(vec![group(GroupState::Regressed, NOW - 1_000)]),
            Some((ProblemKind::GroupRegressed, NextStep::LookAtGroup, Some(true))),
        ),
        (
            |survey| letters(survey).groups = Some(vec![group(GroupState::Open, NOW - 301_000)]),
            Some((ProblemKind::GroupNew, NextStep::LookAtGroup, Some(false))),
        ),
        (
            |survey| {
                let missing = (("a-dlq".into(), Some(1)), crate::completeness::Reason::NotRead);
                letters(survey).completeness.missing.extend([missing]);
            },
            Some((ProblemKind::Incomplete, NextStep::Wait, None)),
        ),
        (
            |survey| survey.controls = controls(&[("pipeline/a", PAUSED_PIPELINE, NOW - 3_600_000)]),
            Some((ProblemKind::Paused, NextStep::Resume, None)),
        ),
        (
            |survey| survey.controls = controls(&[("pipeline/a", PAUSED_PIPELINE, NOW - 3_599_000)]),
            None,
        ),
    ];
    let pipelines = pipelines(&["a", "b"]);
    for (index, (change, expected)) in cases.into_iter().enumerate() {
        let changed = |number| {
            let mut survey = survey(&pipelines, number);
            change(&mut survey);
            survey
        };
        // Only what the last one has is new.
        let first = if matches!(expected, Some((ProblemKind::TopicMissing, ..))) {
            changed(1)
        } else {
            survey(&pipelines, 1)
        };
        let view = seen(&pipelines, &[first, changed(6)]);
        let row = |problem: &v1::Problem| (problem.kind(), problem.next_step(), problem.growing);
        let found: Vec<_> = view.problems.iter().map(row).collect();
        assert_eq!(found, Vec::from_iter(expected), "case {index}");
        let template = view.problems.first().map_or(0, |problem| problem.template.len());
        assert!(template <= 200);
    }
}

#[test]
fn missing_topic_needs_two_surveys() {
    let pipelines = pipelines(&["a"]);
    let lacking = |number| {
        let mut survey = Survey {
            at: at(NOW + 1_000 * i64::try_from(number).unwrap()),
            ..survey(&pipelines, number)
        };
        topics(&mut survey).ends.remove("a-dlq");
        survey
    };
    let view = |surveys: &[Survey]| seen(&pipelines, surveys);
    assert!(view(&[lacking(1)]).problems.is_empty());
    // Between the two, it existed.
    let existed = view(&[lacking(1), survey(&pipelines, 2), lacking(3)]);
    assert!(existed.problems.is_empty());
    // Between the two, nothing was known.
    let unknown = |number| Survey {
        topics: None,
        ..survey(&pipelines, number)
    };
    let found = view(&[lacking(1), unknown(2), lacking(3)]);
    assert_eq!(since(&found.problems[0]), Some(at(NOW + 1_000)));
    assert_eq!(found.pipelines[0].missing_topics, ["a-dlq"]);
    assert_eq!(found.pipelines[0].problem_count, 1);
    // While nothing is known, nothing is missing.
    let found = view(&[lacking(1), lacking(2), unknown(3)]);
    assert!(found.problems.is_empty() && found.pipelines[0].missing_topics.is_empty());
    let found = view(&[lacking(1), lacking(2), unknown(3), lacking(4)]);
    assert_eq!(since(&found.problems[0]), Some(at(NOW + 1_000)));
}

#[test]
fn refused_topics_are_not_missing() {
    let pipelines = pipelines(&["a", "b"]);
    let hidden = ["a", "a-dlq", "a-out", "b", "b-dlq"];
    let mut history = History::default();
    let mut asked_ones: BTreeSet<Arc<str>> = BTreeSet::new();
    for number in 1..=20 {
        let mut survey = survey(&pipelines, number);
        // Kafka is asked of a few in each survey.
        let asked = history.ask(2);
        assert!(asked.len() <= 2);
        let topics = topics(&mut survey);
        for topic in hidden {
            topics.ends.remove(topic);
            // The last one does not exist.
            if asked.contains(topic) && topic != "b-dlq" {
                topics.refused.insert(topic.into());
            }
        }
        history.note(&survey, pipelines.needed.iter(), &asked);
        asked_ones.extend(asked);
        for topic in &hidden[..4] {
            assert_eq!(history.missing_since(&survey, topic), None, "{topic} {number}");
        }
        let is_missing = history.missing_since(&survey, "b-dlq").is_some();
        assert_eq!(is_missing, asked_ones.contains("b-dlq"));
    }
    // Each of them was asked in its turn.
    assert!(hidden.iter().all(|topic| asked_ones.contains(*topic)));
}

#[test]
fn growing_waits_are_noticed() {
    let pipelines = pipelines(&["a"]);
    for (before, now, expected) in [(5, 6, Some(true)), (5, 5, Some(false)), (5, 4, Some(false))] {
        let of = |number, records| {
            let mut survey = survey(&pipelines, number);
            let waiting = backlog(records, Some(&[NOW - 100_000]));
            in_tier(&mut survey, waiting);
            survey
        };
        let view = seen(&pipelines, &[of(1, before), of(6, now)]);
        assert_eq!(view.problems[0].growing, expected);
        let place = &view.pipelines[0].waiting[1];
        assert_eq!((place.overdue, place.overdue_exact), (Some(1), true));
        assert_eq!(view.pipelines[0].next_due, place.next_due);
    }
}

#[test]
fn incomparable_waits_do_not_grow() {
    let pipelines = pipelines(&["a"]);
    let of = |number, records, is_exact, unreachable: &[i32]| {
        let mut survey = survey(&pipelines, number);
        let mut waiting = backlog(records, Some(&[NOW - 100_000]));
        waiting.backlog.is_exact = is_exact;
        waiting.unreachable = unreachable.to_vec();
        in_tier(&mut survey, waiting);
        survey
    };
    let growing = |surveys: [Survey; 2]| {
        let view = seen(&pipelines, &surveys);
        view.problems[0].growing
    };
    assert_eq!(growing([of(1, 5, false, &[]), of(6, 6, false, &[])]), Some(true));
    assert_eq!(growing([of(1, 5, true, &[]), of(6, 6, false, &[])]), None);
    assert_eq!(growing([of(1, 5, true, &[1]), of(6, 6, true, &[])]), None);
    assert_eq!(growing([of(1, 5, true, &[]), of(6, 4, true, &[1])]), None);
    // There is no newer reading.
    let before = of(1, 5, true, &[]);
    let same = Survey {
        waiting: before.waiting.clone(),
        ..survey(&pipelines, 6)
    };
    assert_eq!(growing([before, same]), None);
}

#[test]
fn waits_are_as_of_their_reading() {
    let pipelines = pipelines(&["a"]);
    // Two are due, but not for long. The others were not due yet, and may have been released since.
    let due = [NOW - 59_000, NOW, NOW + 1_000, NOW + 30_000];
    let of = |number, due: &[i64], unreachable: &[i32]| {
        let mut survey = Survey {
            at: at(NOW + 600_000),
            ..survey(&pipelines, number)
        };
        let mut waiting = backlog(4, Some(due));
        waiting.unreachable = unreachable.to_vec();
        in_tier(&mut survey, waiting);
        survey
    };
    let view = |survey: Survey| seen(&pipelines, &[survey]);
    let seen = view(of(1, &due, &[]));
    let place = &seen.pipelines[0].waiting[1];
    assert_eq!((place.overdue, place.overdue_exact), (Some(2), true));
    assert!(seen.problems.is_empty(), "{:?}", seen.problems);
    let late = view(of(1, &[NOW - 60_000, NOW + 1_000], &[]));
    assert_eq!(
        (late.problems[0].kind(), late.problems[0].count),
        (ProblemKind::Overdue, Some(1))
    );
    // An unreachable partition may have an earlier one, unless one is due already.
    for (due, unreachable, expected) in [
        (NOW + 1_000, &[][..], Some(NOW + 1_000)),
        (NOW + 1_000, &[1][..], None),
        (NOW, &[1][..], Some(NOW)),
    ] {
        let row = view(of(1, &[due], unreachable)).pipelines.remove(0);
        for next in [row.next_due, row.waiting[1].next_due] {
            assert_eq!(next.as_ref().and_then(from_timestamp), expected.map(at));
        }
    }
}

#[test]
fn worst_pipelines_are_first() {
    let pipelines = pipelines(&["a", "b", "c", "d"]);
    let mut survey = survey(&pipelines, 1);
    queue(&mut survey, "b", "b", TopicRole::Source, backlog(7, None));
    queue(&mut survey, "c", "c", TopicRole::Source, backlog(9, None));
    let mut of_d = group(GroupState::Open, NOW);
    of_d.topic = "d-dlq".to_owned();
    letters(&mut survey).groups = Some(vec![of_d]);
    let shown = shown(&pipelines, &[survey]);
    let listed = |selection: &Selection| {
        let view = shown.view(&Sees(&["*"]), selection);
        let names: Vec<String> = view.pipelines.into_iter().map(|row| row.pipeline).collect();
        (names.join(" "), view.pipeline_count, view.problem_count)
    };
    let expect = |selection: Selection, names: &str, pipelines, problems| {
        assert_eq!(
            listed(&selection),
            (names.to_owned(), pipelines, problems),
            "{selection:?}"
        );
    };
    expect(ALL, "d c b a", 4, 1);
    expect(Selection { limit: 2, ..ALL }, "d c", 4, 1);
    let by_name = |after: &str| Selection {
        is_by_name: true,
        after: after.to_owned(),
        limit: 2,
        ..ALL
    };
    expect(by_name(""), "a b", 4, 1);
    expect(by_name("b"), "c d", 4, 1);
    let prefix = "b".to_owned();
    expect(Selection { prefix, ..ALL }, "b", 1, 0);
    let pipeline = "d".to_owned();
    expect(Selection { pipeline, ..ALL }, "d", 1, 1);
    let problem_limit = 0;
    let view = shown.view(&Sees(&["*"]), &Selection { problem_limit, ..ALL });
    assert_eq!((view.problems.len(), view.problem_count), (0, 1));
}

#[test]
fn problems_are_ordered_by_urgency() {
    let pipelines = pipelines(&["a", "b"]);
    let mut survey = survey(&pipelines, 1);
    let of = |topic: &str, state, first, last| TopicGroup {
        topic: topic.to_owned(),
        first: at(first),
        ..group(state, last)
    };
    letters(&mut survey).groups = Some(vec![
        of("b-dlq", GroupState::Open, NOW - 9, NOW),
        of("a-dlq", GroupState::Open, NOW - 99_000, NOW - 400_000),
        of("b-dlq", GroupState::Open, NOW - 99, NOW),
        TopicGroup {
            open: 4,
            ..of("b-dlq", GroupState::Open, NOW - 5, NOW)
        },
        of("b-dlq", GroupState::Regressed, NOW - 1, NOW - 400_000),
    ]);
    survey.controls = controls(&[("tier/b/30s", PAUSED_TIER, 0)]);
    let view = seen(&pipelines, &[survey]);
    let row = |problem: &v1::Problem| (problem.kind(), since(problem).unwrap().as_millis());
    let order: Vec<(ProblemKind, i64)> = view.problems.iter().map(row).collect();
    assert_eq!(
        order,
        [
            (ProblemKind::GroupRegressed, NOW - 1),
            // Those that grow: the largest, then the oldest first.
            (ProblemKind::GroupNew, NOW - 5),
            (ProblemKind::GroupNew, NOW - 99),
            (ProblemKind::GroupNew, NOW - 9),
            (ProblemKind::GroupNew, NOW - 99_000),
            (ProblemKind::Paused, 0),
        ]
    );
}

#[test]
fn other_pipelines_are_hidden() {
    let pipelines = pipelines(&["a", "b"]);
    let mut survey = survey(&pipelines, 1);
    let redrive = |sources: &[&str]| Redrive {
        id: "1f".to_owned(),
        sources: sources.iter().map(|topic| (*topic).into()).collect(),
        state: RedriveState::AutoPaused,
        sent_at: None,
        returned: 1,
        by: "token:ann".to_owned(),
    };
    survey.redrives = Some(vec![redrive(&["a-dlq"]), redrive(&["a-dlq", "b-dlq"])]);
    survey.controls = controls(&[
        ("pipeline/a", PAUSED_PIPELINE, 0),
        ("pipeline/b", PAUSED_PIPELINE, 0),
        ("tier/30s", PAUSED_TIER, 0),
    ]);
    let missing = |topic: &str| ((topic.into(), None), crate::completeness::Reason::NoLeader);
    let completeness = &mut letters(&mut survey).completeness;
    completeness.missing.extend([missing("a-dlq"), missing("b-dlq")]);
    let shown = shown(&pipelines, &[survey]);

    let all = shown.view(&Sees(&["*"]), &ALL);
    assert_eq!((all.pipelines.len(), all.problems.len()), (2, 6));
    let some = shown.view(&Sees(&["a-dlq"]), &ALL);
    assert_eq!((some.pipeline_count, some.problem_count), (1, 3));
    let text = format!("{some:?}");
    for hidden in ["b-dlq", "\"b\"", "token:ann\", reason: \"outage", "pipeline/"] {
        assert!(!text.contains(hidden), "{hidden}: {text}");
    }
    let row = &some.pipelines[0];
    assert_eq!(row.run.as_ref().unwrap().paused, Some(true));
    assert_eq!(row.waiting[1].run.as_ref().unwrap().paused, Some(true));
    assert_eq!(row.dead_letters.as_ref().unwrap().auto_paused_redrives, Some(1));
    // Who has paused it is shown with the control.
    let some = shown.view(&Sees(&["a-dlq", "pipeline/a", "tier/30s"]), &ALL);
    let run = some.pipelines[0].run.as_ref().unwrap();
    assert_eq!(
        (&*run.by, &*run.reason, &*run.control),
        ("token:ann", "outage", "pipeline/a")
    );
    assert_eq!(
        some.pipelines[0].waiting[1].run.as_ref().unwrap().control,
        "tier/30s"
    );
    assert_eq!(some.problem_count, 4);
    let nothing = shown.view(&Sees(&[]), &ALL);
    assert_eq!((nothing.pipeline_count, nothing.problem_count), (0, 0));
}

#[test]
fn message_fits_with_many_pipelines() {
    let names: Vec<String> = (0..1_000)
        .map(|number| format!("{}{number:04}", "x".repeat(240)))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let pipelines = pipelines(&names);
    let mut survey = survey(&pipelines, 1);
    let values: Vec<String> = names.iter().map(|name| format!("pipeline/{name}")).collect();
    let values: Vec<_> = values.iter().map(|name| (&**name, PAUSED_PIPELINE, 0)).collect();
    survey.controls = controls(&values);
    topics(&mut survey).ends.clear();
    let selection = Selection {
        limit: 1_000,
        problem_limit: 500,
        ..ALL
    };
    let later = Survey {
        number: 2,
        topics: survey.topics.clone(),
        controls: survey.controls.clone(),
        ..self::survey(&pipelines, 2)
    };
    let view = shown(&pipelines, &[survey, later]).view(&Sees(&["*"]), &selection);
    assert!(view.encoded_len() < 4 << 20, "{}", view.encoded_len());
    assert!(view.pipelines.len() > 500 && view.pipeline_count == 1_000);
    // Source, output, tier, due and dead letters of each are missing, and it is paused.
    assert_eq!((view.problems.len(), view.problem_count), (500, 6_000));
}

#[test]
fn defects_are_the_first_problem() {
    let pipelines = pipelines(&["a", "b", "c"]);
    let audit = |state: v1::PipelineAuditState| v1::PipelineAudit {
        state: state.into(),
        since: Some(to_timestamp(at(NOW))),
        defects: vec![v1::PipelineDefect {
            kind: "lost".to_owned(),
            count: 3,
            first: Vec::new(),
        }],
        ..v1::PipelineAudit::default()
    };
    let survey = Survey {
        controls: controls(&[("pipeline/a", PAUSED_PIPELINE, 0)]),
        audits: [
            ("b".to_owned(), audit(v1::PipelineAuditState::Unknown)),
            ("c".to_owned(), audit(v1::PipelineAuditState::NotClean)),
        ]
        .into(),
        ..survey(&pipelines, 1)
    };
    let shown = shown(&pipelines, &[survey]);
    let view = shown.view(&Sees(&["*"]), &ALL);
    assert_eq!(kinds(&view), [ProblemKind::NotClean, ProblemKind::Paused]);
    let problem = &view.problems[0];
    assert_eq!((&*problem.pipeline, problem.count), ("c", Some(3)));
    assert_eq!(problem.next_step(), NextStep::LookAtRecords);
    assert_eq!(names(&view), ["c", "a", "b"]);
    let states = view
        .pipelines
        .iter()
        .map(|row| row.audit.as_ref().map(v1::PipelineAudit::state));
    let known = [
        Some(v1::PipelineAuditState::NotClean),
        None,
        Some(v1::PipelineAuditState::Unknown),
    ];
    assert_eq!(states.collect::<Vec<_>>(), known);
    let of_a = shown.view(&Sees(&["a-dlq"]), &ALL).problems;
    assert!(of_a.iter().all(|problem| problem.pipeline == "a"));
}

#[test]
fn digest_ignores_the_time() {
    let pipelines = pipelines(&["a"]);
    let view = |survey: Survey| seen(&pipelines, &[survey]);
    let one = digest(&view(survey(&pipelines, 1)));
    let later = Survey {
        at: at(NOW + 1_000),
        ..survey(&pipelines, 2)
    };
    assert_eq!(digest(&view(later)), one);
    let mut other = survey(&pipelines, 2);
    queue(&mut other, "a", "a", TopicRole::Source, backlog(1, None));
    assert_ne!(digest(&view(other)), one);
}

#[test]
fn digest_ignores_the_window_of_rates() {
    let pipelines = pipelines(&["a"]);
    let of = |millis: u64, offsets| {
        let mut survey = Survey {
            uptime: Duration::from_millis(millis),
            ..survey(&pipelines, millis)
        };
        topics(&mut survey).ends.get_mut("a").unwrap().offsets = offsets;
        survey
    };
    let view = |surveys: &[Survey]| seen(&pipelines, surveys);
    let one = view(&[of(1_000, 0), of(2_013, 101_310)]);
    let later = view(&[of(1_000, 0), of(2_013, 101_310), of(3_027, 202_650)]);
    let rates = [&one, &later].map(|view| view.pipelines[0].rates.unwrap());
    assert_eq!(rates.map(|rates| rates.received), [Some(100_000.0); 2]);
    assert_ne!(rates[0].window, rates[1].window);
    assert_eq!(digest(&one), digest(&later));
    let other = view(&[of(1_000, 0), of(2_013, 101_310), of(3_027, 204_800)]);
    assert_ne!(digest(&one), digest(&other));
}

#[test]
fn what_is_incomplete_is_always_shown() {
    let pipelines = pipelines(&["a", "b"]);
    let mut survey = Survey {
        incomplete: [(v1::OverviewPart::Topics, "no answer")].into(),
        controls: controls(&[("pipeline/b", PAUSED_PIPELINE, 0)]),
        ..survey(&pipelines, 1)
    };
    let missing = (("b-dlq".into(), None), crate::completeness::Reason::NoLeader);
    letters(&mut survey).completeness.missing.extend([missing]);
    let shown = shown(&pipelines, &[survey]);
    for (pipeline, prefix) in [("a", ""), ("", "a")] {
        let selection = Selection {
            pipeline: pipeline.to_owned(),
            prefix: prefix.to_owned(),
            ..ALL
        };
        let view = shown.view(&Sees(&["*"]), &selection);
        assert_eq!(kinds(&view), [ProblemKind::Incomplete; 2]);
    }
}
