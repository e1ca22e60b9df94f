//! What a caller sees of an overview: what it would see if there were nothing else.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use redeliver_core::Timestamp;
use redeliver_core::failure::bounded_text;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};

use super::history::History;
use super::pipelines::{PipelineRow, Pipelines, rows};
use super::problems::{Found, problems};
use super::survey::{Redrive, RedriveState, Survey};
use crate::completeness::Completeness;

/// The maximum size of the pipelines of a message in bytes: with problems and the rest, it has less than the 4 MiB that clients accept.
const MAX_PIPELINES: usize = 5 << 19;
/// The maximum length of a reason in a message, in bytes.
const MAX_REASON: usize = 300;

/// An overview of everything, for all callers.
#[derive(Debug)]
pub(crate) struct Overview {
    number: u64,
    at: Timestamp,
    waiting_at: Option<Timestamp>,
    rows: Vec<PipelineRow>,
    problems: Vec<Found>,
    redrives: Option<Vec<Redrive>>,
    incomplete: Vec<v1::IncompletePart>,
    /// Of dead letters.
    completeness: Completeness,
}

/// What a caller may see.
pub(crate) trait Caller {
    /// Whether it sees the dead letters of a topic.
    fn sees(&self, topic: &str) -> bool;
    /// Whether it sees who has paused something, and why.
    fn sees_control(&self, control: &str) -> bool;
    /// Whether error codes of a topic are masked for it.
    fn lacks_codes(&self, topic: &str) -> bool;
}

/// Which pipelines a caller wants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    /// Empty: all.
    pub(crate) pipeline: String,
    pub(crate) prefix: String,
    pub(crate) is_by_name: bool,
    pub(crate) after: String,
    pub(crate) limit: usize,
    pub(crate) problem_limit: usize,
}

impl Selection {
    fn has(&self, pipeline: &str) -> bool {
        (self.pipeline.is_empty() || *self.pipeline == *pipeline) && pipeline.starts_with(&self.prefix)
    }

    /// Whether a problem is of one of the pipelines. Those of none are shown with all pipelines, and what is incomplete with each of them: the
    /// problems of a pipeline may be among what is unknown.
    fn has_problem(&self, problem: &v1::Problem) -> bool {
        match &*problem.pipeline {
            _ if problem.kind() == v1::ProblemKind::Incomplete => true,
            "" => self.pipeline.is_empty() && self.prefix.is_empty(),
            pipeline => self.has(pipeline),
        }
    }
}

impl Overview {
    /// Puts a survey together.
    pub(crate) fn of(pipelines: &Pipelines, survey: &Survey, history: &History) -> Self {
        let incomplete = survey
            .incomplete
            .iter()
            .map(|(part, problem)| v1::IncompletePart {
                part: (*part).into(),
                since: history.incomplete_since(*part).map(to_timestamp),
                problem: (*problem).to_owned(),
            });
        // It is no problem: an installation can do without the topic.
        let breakers = survey.breakers.is_none().then(|| v1::IncompletePart {
            part: v1::OverviewPart::Breakers.into(),
            since: None,
            problem: "the status topic is not read yet, does not exist, or cannot be read".to_owned(),
        });
        let letters = survey.letters.as_ref();
        Self {
            number: survey.number,
            at: survey.at,
            waiting_at: survey.waiting.as_ref().map(|reading| reading.at),
            rows: rows(pipelines, survey, history),
            problems: problems(pipelines, survey, history),
            incomplete: incomplete.chain(breakers).collect(),
            completeness: letters.map_or_else(Completeness::default, |letters| letters.completeness.clone()),
            redrives: survey.redrives.clone(),
        }
    }

    #[cfg(test)]
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// What a caller sees of it.
    pub(crate) fn view(&self, caller: &impl Caller, selection: &Selection) -> v1::Overview {
        let completeness = self.completeness.of_topics(|topic| caller.sees(topic));
        let completeness = completeness.to_message(self.at);
        let mut problems = self.problems(caller, &completeness);
        let mut worst: BTreeMap<&str, (i32, u32)> = BTreeMap::new();
        for problem in &problems {
            let of_problem = rank(problem.kind());
            let (kind, count) = worst.entry(&problem.pipeline).or_insert((of_problem, 0));
            (*kind, *count) = ((*kind).min(of_problem), *count + 1);
        }
        let redrives = RedriveCounts::of(self.redrives.as_deref(), caller);
        let mut seen: Vec<&PipelineRow> = self
            .rows
            .iter()
            .filter(|row| selection.has(&row.message.pipeline) && caller.sees(&row.letters))
            .collect();
        let pipeline_count = seen.len();
        if selection.is_by_name {
            seen.retain(|row| *row.message.pipeline > *selection.after);
        } else {
            seen.sort_by_cached_key(|row| {
                let kind = worst
                    .get(&*row.message.pipeline)
                    .map_or(i32::MAX, |(kind, _)| *kind);
                let lag = row.message.lag.as_ref().and_then(|lag| lag.records);
                (kind, Reverse(lag))
            });
        }
        let mut bytes = 0;
        let pipelines = seen.into_iter().take(selection.limit).map(|row| {
            let mut message = row.message.clone();
            message.problem_count = worst.get(&*message.pipeline).map_or(0, |(_, count)| *count);
            if let Some(letters) = &mut message.dead_letters {
                redrives.add(letters);
            }
            let runs = message.waiting.iter_mut().filter_map(|place| place.run.as_mut());
            for run in runs.chain(&mut message.run) {
                hide_control(run, caller);
            }
            message
        });
        let pipelines = pipelines.take_while(|message| {
            bytes += message.encoded_len();
            bytes <= MAX_PIPELINES
        });
        let pipelines = pipelines.collect();
        problems.retain(|problem| selection.has_problem(problem));
        problems.sort_by_cached_key(urgency);
        let problem_count = problems.len();
        problems.truncate(selection.problem_limit);
        v1::Overview {
            survey: self.number,
            as_of: Some(to_timestamp(self.at)),
            waiting_as_of: self.waiting_at.map(to_timestamp),
            problems,
            problem_count: number(problem_count),
            pipelines,
            pipeline_count: number(pipeline_count),
            incomplete: self.incomplete.clone(),
            completeness: Some(completeness),
        }
    }

    /// The problems of which a caller may know.
    fn problems(&self, caller: &impl Caller, completeness: &v1::Completeness) -> Vec<v1::Problem> {
        let is_visible = |found: &&Found| {
            found.topics.iter().all(|topic| caller.sees(topic))
                && (!found.is_about_control || caller.sees_control(&found.message.control))
        };
        let visible = self.problems.iter().filter(is_visible).map(|found| {
            let mut problem = found.message.clone();
            if !problem.control.is_empty() && !caller.sees_control(&problem.control) {
                (problem.by, problem.reason, problem.since) = (String::new(), String::new(), None);
                problem.control = String::new();
            }
            if found.topics.iter().any(|topic| caller.lacks_codes(topic)) {
                problem.error_code.clear();
            }
            problem.reason = bounded_text(&problem.reason, MAX_REASON);
            problem
        });
        let parts = self.incomplete.iter().filter(|part| part.since.is_some());
        let incomplete = parts.map(|part| v1::Problem {
            kind: v1::ProblemKind::Incomplete.into(),
            since: part.since,
            next_step: next_step(part.part()).into(),
            part: part.part,
            ..v1::Problem::default()
        });
        let mut problems: Vec<v1::Problem> = visible.chain(incomplete).collect();
        if completeness.missing_count > 0 {
            problems.push(missing_partitions(completeness));
        }
        problems
    }
}

/// The place of a kind of problems among the others.
fn rank(kind: v1::ProblemKind) -> i32 {
    match kind {
        v1::ProblemKind::NotClean => 0,
        kind => kind.into(),
    }
}

/// Which problems are first: by kind, then those that grow, then groups with most open letters, then those with the nearest deadline or that last for
/// longest.
fn urgency(problem: &v1::Problem) -> impl Ord + use<> {
    let letters = problem.count.filter(|_| !problem.group_id.is_empty());
    let time = problem.deadline.or(problem.since);
    let time = time.map_or((i64::MAX, 0), |time| (time.seconds, time.nanos));
    (
        rank(problem.kind()),
        problem.growing != Some(true),
        Reverse(letters),
        time,
        problem.pipeline.clone(),
        problem.topic.clone(),
    )
}

/// Partitions whose dead letters may be missing.
fn missing_partitions(completeness: &v1::Completeness) -> v1::Problem {
    let reads = |missing: &v1::MissingPartition| {
        matches!(
            missing.reason(),
            v1::MissingReason::NotRead | v1::MissingReason::NotRemoved
        )
    };
    let is_temporary = completeness.missing.iter().all(reads);
    let first = completeness.missing.first();
    let next_step = if is_temporary {
        v1::NextStep::Wait
    } else {
        v1::NextStep::CheckKafka
    };
    v1::Problem {
        kind: v1::ProblemKind::Incomplete.into(),
        count: Some(completeness.missing_count.into()),
        next_step: next_step.into(),
        topic: first.map_or_else(String::new, |missing| missing.topic.clone()),
        part: v1::OverviewPart::DeadLetters.into(),
        ..v1::Problem::default()
    }
}

/// What to do about a part that is unknown.
fn next_step(part: v1::OverviewPart) -> v1::NextStep {
    match part {
        v1::OverviewPart::DeadLetters | v1::OverviewPart::Redrives | v1::OverviewPart::Waiting => {
            v1::NextStep::Wait
        }
        _ => v1::NextStep::CheckKafka,
    }
}

fn hide_control(run: &mut v1::RunOverview, caller: &impl Caller) {
    run.reason = bounded_text(&run.reason, MAX_REASON);
    if run.control.is_empty() || caller.sees_control(&run.control) {
        return;
    }
    *run = v1::RunOverview {
        paused: run.paused,
        per_second: run.per_second,
        ..v1::RunOverview::default()
    };
}

/// How many redrives a caller sees, by topic and state.
struct RedriveCounts<'o>(Option<BTreeMap<&'o str, [u32; 3]>>);

impl<'o> RedriveCounts<'o> {
    fn of(redrives: Option<&'o [Redrive]>, caller: &impl Caller) -> Self {
        Self(redrives.map(|redrives| {
            let mut counts: BTreeMap<&str, [u32; 3]> = BTreeMap::new();
            for redrive in redrives {
                if redrive.sources.iter().all(|topic| caller.sees(topic)) {
                    for topic in &redrive.sources {
                        counts.entry(topic).or_default()[redrive.state as usize] += 1;
                    }
                }
            }
            counts
        }))
    }

    fn add(&self, letters: &mut v1::DeadLettersOverview) {
        let counts = self.0.as_ref();
        let count = |state: RedriveState| {
            let of_topic = counts?.get(&*letters.topic);
            Some(of_topic.map_or(0, |counts| counts[state as usize]))
        };
        letters.running_redrives = count(RedriveState::Running);
        letters.paused_redrives = count(RedriveState::Paused);
        letters.auto_paused_redrives = count(RedriveState::AutoPaused);
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// What lasts of an overview: two with the same digest differ only in what changes with each survey.
pub(crate) fn digest(overview: &v1::Overview) -> u64 {
    let mut lasting = v1::Overview {
        survey: 0,
        as_of: None,
        waiting_as_of: None,
        completeness: overview
            .completeness
            .clone()
            .map(|completeness| v1::Completeness {
                as_of: None,
                ..completeness
            }),
        ..overview.clone()
    };
    for row in &mut lasting.pipelines {
        if let Some(rates) = &mut row.rates {
            rates.window = None;
        }
        if let Some(audit) = &mut row.audit {
            audit.as_of = None;
        }
    }
    let mut hasher = DefaultHasher::new();
    lasting.encode_to_vec().hash(&mut hasher);
    hasher.finish()
}
