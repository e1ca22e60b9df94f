//! Automatic redrives of a pipeline: which dead letters the next job takes, and whether there is a next job. No IO.
//!
//! A pipeline has one automatic job at a time. Its successor follows from it: the request id of a job names the job before it, so that inspectors that
//! plan at the same time plan the same job, which the topic of jobs contains once.
//!
//! An automatic job takes each dead letter once. What it has not done, because somebody has cancelled it or because of a problem, is left to people. When the
//! job is removed, another one of the pipeline keeps that in further chunks of its plan, see [`super::room`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Timestamp, redrive};
use redeliver_proto::convert::to_duration;
use redeliver_proto::v1;
use redeliver_runtime::config::AutomaticRedriveConfig;

use super::job::{self, Item, Job, Kind, Outcome, Skip};
use super::jobs::{Entry, Jobs};
use super::record::{Candidate, Destinations, Wish};
use crate::header_list;
use crate::id::LetterId;
use crate::index::IndexedLetter;
use crate::letter::ContentHash;

/// The author of automatic jobs.
pub const AUTHOR: &str = "automatic";
/// The request ids of automatic jobs begin with a character that callers cannot send.
const REQUEST: char = '\u{1}';
/// The maximum number of dead letters of a job. With more, jobs follow one after the other.
pub const MAX_ITEMS: usize = 10_000;
/// How many jobs of a pipeline that have succeeded are kept, and how many that have ended otherwise.
const KEPT: usize = 10;
/// The maximum number of dead letters of a pipeline that jobs that are removed have not done and no other job takes.
pub const MAX_LEFT: usize = 10_000;
/// The number of ids that a job shows.
const SAMPLES: usize = 5;

/// The automatic redrive of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The pipeline.
    pub pipeline: String,
    /// Its dead-letter topic.
    pub topic: String,
    /// What is redriven, and how.
    pub settings: AutomaticRedriveConfig,
}

/// How the automatic redrive of a pipeline stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// No job of it is left to do. The last one, if any.
    Idle(Option<Box<Job>>),
    /// A job runs.
    Running,
    /// A job runs, and nothing can be done for it now.
    Stuck,
    /// A caller has paused a job.
    Paused,
    /// The brake has paused a job.
    Braked,
}

impl Standing {
    /// From the jobs.
    #[must_use]
    pub fn of(pipeline: &str, jobs: &Jobs) -> Self {
        // Ids increase with the time, and from one job to its successor.
        let Some((_, entry, job)) = of_pipeline(pipeline, jobs).next_back() else {
            return Self::Idle(None);
        };
        let progress = entry.progress();
        match job::state(&job, &progress) {
            v1::RedriveState::Paused if job::is_braked(&job, &progress) => Self::Braked,
            v1::RedriveState::Paused => Self::Paused,
            state if job::has_ended(state) => Self::Idle(Some(Box::new(job))),
            _ if !progress.problem.is_empty() => Self::Stuck,
            _ => Self::Running,
        }
    }

    /// As metrics show it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Idle(_) => "idle",
            Self::Running => "running",
            Self::Stuck => "stuck",
            Self::Paused => "paused",
            Self::Braked => "braked",
        }
    }
}

/// The automatic jobs of a pipeline, oldest first.
fn of_pipeline<'j>(
    pipeline: &'j str,
    jobs: &'j Jobs,
) -> impl DoubleEndedIterator<Item = (&'j str, &'j Arc<Entry>, Job)> {
    let all = jobs.iter();
    all.filter(move |(_, _, job)| job.spec().automatic_pipeline == pipeline)
}

/// The automatic jobs of a pipeline that are superseded by newer ones. Those of callers, which are jobs of no pipeline, never are.
#[must_use]
pub fn superseded(pipeline: &str, jobs: &Jobs) -> BTreeSet<String> {
    if pipeline.is_empty() {
        return BTreeSet::new();
    }
    // The last jobs of each kind are reports for people. The last of all is that from which the next one follows.
    let (mut succeeded, mut others) = (0, 0);
    let is_superseded = |(_, entry, job): &(&str, &Arc<Entry>, Job)| {
        let newer = match job::state(job, &entry.progress()) {
            v1::RedriveState::Succeeded => &mut succeeded,
            state if job::has_ended(state) => &mut others,
            _ => return false,
        };
        *newer += 1;
        *newer > KEPT
    };
    let newest_first = of_pipeline(pipeline, jobs).rev();
    let superseded = newest_first.filter(is_superseded);
    superseded.map(|(id, ..)| id.to_owned()).collect()
}

/// What a job that has ended has not done of its own dead letters.
#[must_use]
pub fn not_done(entry: &Entry, job: &Job) -> Vec<Item> {
    let own = entry.chunks().filter(|chunk| *chunk < job.record.chunks);
    let not_done = own.flat_map(|chunk| {
        let outcomes = entry.outcomes(chunk);
        let is_done = |index: usize| outcomes.numbers().get(index) == Some(&Outcome::Done.number());
        let items = entry.items(chunk).unwrap_or_default().into_iter().enumerate();
        let items = items.filter(|(index, _)| !is_done(*index));
        items.map(|(_, item)| item).collect::<Vec<Item>>()
    });
    not_done.collect()
}

/// The request id of the job that follows this one, or of the first one of a pipeline.
fn request_id(pipeline: &str, predecessor: Option<&str>) -> String {
    format!("{REQUEST}{pipeline}/{}", predecessor.unwrap_or_default())
}

/// Whether a job is not automatic, or follows the last one of its pipeline. Another inspector can have planned jobs since this one was decided.
#[must_use]
pub fn follows(record: &v1::RedriveRecord, jobs: &Jobs) -> bool {
    let pipeline = record
        .redrive
        .as_ref()
        .map(|redrive| &*redrive.automatic_pipeline);
    let Some(pipeline) = pipeline.filter(|pipeline| !pipeline.is_empty()) else {
        return true;
    };
    let last = of_pipeline(pipeline, jobs).next_back().map(|(id, ..)| id);
    record.request_id == request_id(pipeline, last)
}

impl Rule {
    /// The filter that the candidates match now, apart from their state.
    #[must_use]
    pub fn filter(&self, now: Timestamp) -> String {
        let AutomaticRedriveConfig {
            after,
            error_classes,
            error_codes,
            ..
        } = &self.settings;
        let age = i64::try_from(after.as_millis()).unwrap_or(i64::MAX);
        let before = Timestamp::from_millis(now.as_millis().saturating_sub(age));
        let mut filter = format!("topic = \"{}\" AND dead_at <= \"{before}\"", self.topic);
        for (field, values) in [("error_class", error_classes), ("error_code", error_codes)] {
            let one: Vec<String> = values
                .iter()
                .map(|value| format!("{field} = \"{value}\""))
                .collect();
            if !one.is_empty() {
                filter += &format!(" AND ({})", one.join(" OR "));
            }
        }
        filter
    }

    /// When the job after this one is planned at the earliest, so that its id is greater.
    #[must_use]
    pub fn plan_at(last: Option<&Job>, now: Timestamp) -> Timestamp {
        let after_last = last.map(|last| last.created_at().after(Duration::from_millis(1)));
        after_last.map_or(now, |after_last| after_last.max(now))
    }
}

/// The candidates for the next job of a pipeline, which are added one by one, oldest first.
#[derive(Debug)]
pub struct Selection<'r> {
    rule: &'r Rule,
    destinations: &'r Destinations,
    taken: HashMap<(i32, i64), Vec<ContentHash>>,
    kinds: BTreeMap<bool, Chosen>,
}

/// The dead letters for a job of one kind.
#[derive(Debug, Default)]
struct Chosen {
    items: Vec<Item>,
    destination: String,
    has_more: bool,
}

impl<'r> Selection<'r> {
    /// Nothing yet. Those of earlier automatic jobs are never taken.
    #[must_use]
    pub fn new(rule: &'r Rule, destinations: &'r Destinations, jobs: &Jobs) -> Self {
        let mut taken: HashMap<(i32, i64), Vec<ContentHash>> = HashMap::new();
        for (_, entry, _) in of_pipeline(&rule.pipeline, jobs) {
            // Also what jobs that are removed have left.
            for chunk in entry.chunks() {
                for Item { id, content } in entry.items(chunk).unwrap_or_default() {
                    taken.entry((id.partition, id.offset)).or_default().push(content);
                }
            }
        }
        Self {
            rule,
            destinations,
            taken,
            kinds: BTreeMap::new(),
        }
    }

    /// Whether more candidates change nothing.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.kinds.len() == 2 && self.kinds.values().all(|chosen| chosen.has_more)
    }

    /// Adds a candidate that matches the filter of the rule and is OPEN, if it is one.
    pub fn add(&mut self, letter: &IndexedLetter) {
        let headers = header_list::decode(&letter.headers);
        let candidate = self.destinations.candidate(letter, &headers);
        self.add_candidate(&letter.id, letter.content, candidate);
    }

    fn add_candidate(&mut self, id: &LetterId, content: ContentHash, candidate: Candidate<'_>) {
        let taken = self.taken.get(&(id.partition, id.offset));
        if id.topic != self.rule.topic || taken.is_some_and(|taken| taken.contains(&content)) {
            return;
        }
        let is_used_up = redrive::count(candidate.headers) >= self.rule.settings.max_count;
        let Ok(destination) = self.destination(candidate, is_used_up) else {
            return;
        };
        let chosen = self.kinds.entry(is_used_up).or_default();
        if chosen.items.len() >= MAX_ITEMS {
            chosen.has_more = true;
            return;
        }
        chosen.destination = destination;
        chosen.items.push(Item {
            id: id.clone(),
            content,
        });
    }

    /// Where a candidate goes. Only records of the pipeline are redriven without a caller.
    fn destination(&self, candidate: Candidate<'_>, is_used_up: bool) -> Result<String, Skip> {
        let parking = self.destinations.parking(candidate)?;
        if is_used_up {
            return Ok(parking.topic.to_string());
        }
        let target = self.destinations.target(candidate, &Wish::default())?;
        Ok(target.topic.to_string())
    }

    /// The next job, with its items in the order in which they are read from Kafka; `None` if there is nothing to do. Its kind is another one than that of the
    /// last job, if both kinds have something to do.
    #[must_use]
    pub fn job(mut self, last: Option<&Job>, filter: &str) -> Option<(v1::RedriveRecord, Vec<Item>)> {
        let parks_first = last.is_none_or(|last| last.kind != Kind::Park);
        let is_used_up = [parks_first, !parks_first]
            .into_iter()
            .find(|kind| self.kinds.contains_key(kind))?;
        let mut chosen = self.kinds.remove(&is_used_up)?;
        chosen
            .items
            .sort_by_key(|item| (item.id.partition, item.id.offset));
        let kind = if is_used_up {
            v1::RedriveKind::Park
        } else {
            v1::RedriveKind::Redrive
        };
        let total = u32::try_from(chosen.items.len()).unwrap_or(u32::MAX);
        let counts = |topic: &str| {
            vec![v1::RedriveCount {
                topic: topic.to_owned(),
                count: total,
            }]
        };
        let samples = chosen.items.iter().take(SAMPLES);
        let Rule {
            pipeline, settings, ..
        } = self.rule;
        let redrive = v1::Redrive {
            kind: kind.into(),
            filter: filter.to_owned(),
            why: match kind {
                v1::RedriveKind::Park => format!("automatic redrives of the pipeline {pipeline} are used up"),
                _ => format!("automatic redrive of the pipeline {pipeline}"),
            },
            total,
            sources: counts(&self.rule.topic),
            destinations: counts(&chosen.destination),
            samples: samples.map(|item| item.id.to_string()).collect(),
            rate_per_second: settings.rate,
            max_returned_share: settings.max_returned_share,
            observe: (!is_used_up).then(|| {
                let observe = settings.observe;
                to_duration(observe.unwrap_or_else(|| self.destinations.observe(&[&chosen.destination])))
            }),
            has_more: chosen.has_more,
            automatic_pipeline: pipeline.clone(),
            automatic_max_count: if is_used_up { 0 } else { settings.max_count },
            ..v1::Redrive::default()
        };
        let predecessor = last.map(|last| last.spec().id.as_str());
        let record = v1::RedriveRecord {
            // It is started with its plan.
            wanted: v1::RedriveState::Running.into(),
            run: 1,
            request_id: request_id(pipeline, predecessor),
            redrive: Some(redrive),
            ..v1::RedriveRecord::default()
        };
        Some((record, chosen.items))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::redrive::REDRIVE_COUNT;
    use redeliver_core::{Headers, Pipeline, headers};
    use redeliver_proto::Message as _;
    use redeliver_service::followed::Contents as _;

    use super::super::job::tests::item;
    use super::super::job::{CHUNK, Progress};
    use super::super::jobs::tests::record;
    use super::super::jobs::{job_key, outcomes_key, plan_key, progress_key};
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn rule() -> Rule {
        Rule {
            pipeline: "docs".to_owned(),
            topic: "docs-dlq".to_owned(),
            settings: AutomaticRedriveConfig::default(),
        }
    }

    fn destinations() -> Destinations {
        Destinations::new(&[Pipeline::new("docs")], &[], Vec::new(), 3)
    }

    fn died(pipeline: &str, redrives: u32) -> Headers {
        let mut headers = Headers::new();
        headers.push_text(headers::PIPELINE, pipeline);
        headers.push_text(headers::ORIGINAL_TOPIC, "docs");
        headers.push_text(headers::ORIGINAL_PARTITION, "0");
        headers.push_text(headers::ORIGINAL_OFFSET, "1");
        headers.push_text(headers::RETRY_COUNT, "4");
        headers.push_text(REDRIVE_COUNT, &redrives.to_string());
        headers
    }

    /// The kind of the next job and its offsets.
    fn next(jobs: &Jobs, letters: &[(i64, Headers)]) -> Option<(v1::RedriveRecord, Vec<i64>)> {
        let (rule, destinations) = (rule(), destinations());
        let mut selection = Selection::new(&rule, &destinations, jobs);
        for (offset, headers) in letters {
            let Item { id, content } = item("docs-dlq", *offset);
            let candidate = Candidate {
                topic: "docs-dlq",
                headers,
                is_empty: false,
                is_restorable: false,
            };
            selection.add_candidate(&id, content, candidate);
        }
        let Standing::Idle(last) = Standing::of("docs", jobs) else {
            panic!("a job is left");
        };
        let (record, items) = selection.job(last.as_deref(), "f")?;
        Some((record, items.iter().map(|item| item.id.offset).collect()))
    }

    /// Takes note of a job that has done the first `done` of its items.
    fn add(
        jobs: &mut Jobs,
        id: &str,
        planned: &(v1::RedriveRecord, Vec<i64>),
        done: u32,
        wanted: v1::RedriveState,
    ) {
        let (mut written, offsets) = planned.clone();
        written.chunks = u32::try_from(offsets.len()).unwrap().div_ceil(CHUNK);
        written.wanted = wanted.into();
        written.redrive.as_mut().unwrap().id = id.to_owned();
        let items: Vec<Item> = offsets.iter().map(|offset| item("docs-dlq", *offset)).collect();
        for (chunk, value) in (0..).zip(job::chunks(&items)) {
            jobs.apply(&record(&plan_key(id, chunk), Some(value.encode_to_vec().into())));
            let done = done.saturating_sub(chunk * CHUNK).min(CHUNK) as usize;
            let outcomes = v1::RedriveOutcomes {
                outcomes: vec![Outcome::Done.number(); done].into(),
                ..v1::RedriveOutcomes::default()
            };
            jobs.apply(&record(
                &outcomes_key(id, chunk),
                Some(outcomes.encode_to_vec().into()),
            ));
        }
        let mut progress = Progress::default();
        (0..done).for_each(|_| progress.count(Outcome::Done));
        progress.observed = progress.done;
        let progress: Bytes = progress.to_record().encode_to_vec().into();
        jobs.apply(&record(&progress_key(id), Some(progress)));
        jobs.apply(&record(&job_key(id), Some(written.encode_to_vec().into())));
    }

    #[test]
    fn what_was_redriven_often_is_parked_and_the_rest_is_redriven_in_turns() {
        let letters: Vec<(i64, Headers)> = (0..6)
            .map(|offset| (offset, died("docs", u32::try_from(offset % 3).unwrap())))
            .chain([(9, died("other", 0))])
            .collect();
        let mut jobs = Jobs::default();
        let parked = next(&jobs, &letters).unwrap();
        assert_eq!(
            (parked.0.redrive.as_ref().unwrap().kind(), &parked.1[..]),
            (v1::RedriveKind::Park, &[2, 5][..])
        );
        assert_eq!(
            parked.0.redrive.as_ref().unwrap().destinations[0].topic,
            "docs-parked"
        );
        add(&mut jobs, "1", &parked, 2, v1::RedriveState::Running);
        let redriven = next(&jobs, &letters).unwrap();
        let spec = redriven.0.redrive.clone().unwrap();
        assert_eq!(
            (spec.kind(), &redriven.1[..]),
            (v1::RedriveKind::Redrive, &[0, 1, 3, 4][..])
        );
        assert_eq!(
            (&*spec.destinations[0].topic, spec.automatic_max_count),
            ("docs-retry-due", 2)
        );
        add(&mut jobs, "2", &redriven, 4, v1::RedriveState::Running);
        assert_eq!(next(&jobs, &letters), None);
    }

    #[test]
    fn the_successor_of_a_job_has_one_request_id_and_a_greater_id() {
        let letters = [(1, died("docs", 0))];
        let mut jobs = Jobs::default();
        let first = next(&jobs, &letters).unwrap();
        assert_eq!(first.0.request_id, "\u{1}docs/");
        add(&mut jobs, "1f", &first, 1, v1::RedriveState::Running);
        let second = next(&jobs, &[(2, died("docs", 0))]).unwrap();
        assert_eq!(second.0.request_id, "\u{1}docs/1f");
        assert!(follows(&second.0, &jobs) && !follows(&first.0, &jobs));
        assert_eq!(second.0.wanted(), v1::RedriveState::Running);
        let Standing::Idle(Some(mut last)) = Standing::of("docs", &jobs) else {
            panic!("idle");
        };
        let later = redeliver_proto::convert::to_timestamp(NOW.after(Duration::from_secs(9)));
        last.record.redrive.as_mut().unwrap().created_at = Some(later);
        // The clock of the inspector that has planned the last job is ahead.
        assert_eq!(
            Rule::plan_at(Some(&last), NOW),
            NOW.after(Duration::from_millis(9_001))
        );
        assert_eq!(Rule::plan_at(None, NOW), NOW);
    }

    #[test]
    fn nothing_follows_a_job_that_is_left_and_what_was_cancelled_is_not_taken_again() {
        let letters = [(1, died("docs", 0)), (2, died("docs", 0))];
        let first = next(&Jobs::default(), &letters).unwrap();
        let standing = |wanted, done| {
            let mut jobs = Jobs::default();
            add(&mut jobs, "1", &first, done, wanted);
            (Standing::of("docs", &jobs), Standing::of("other", &jobs))
        };
        let of_docs = |wanted, done| standing(wanted, done).0.name();
        assert_eq!(of_docs(v1::RedriveState::Running, 1), "running");
        assert_eq!(of_docs(v1::RedriveState::Paused, 1), "paused");
        assert_eq!(of_docs(v1::RedriveState::Running, 2), "idle");
        assert_eq!(standing(v1::RedriveState::Running, 1).1, Standing::Idle(None));
        let mut jobs = Jobs::default();
        add(&mut jobs, "1", &first, 1, v1::RedriveState::Running);
        let braked = Progress {
            next: 1,
            done: 1,
            braked_run: 1,
            ..Progress::default()
        };
        jobs.apply_own("1", &braked, Vec::new());
        assert_eq!(Standing::of("docs", &jobs), Standing::Braked);
        let stuck = Progress {
            problem: "records wait".to_owned(),
            braked_run: 0,
            ..braked
        };
        jobs.apply_own("1", &stuck, Vec::new());
        assert_eq!(Standing::of("docs", &jobs), Standing::Stuck);
        let mut jobs = Jobs::default();
        add(&mut jobs, "1", &first, 1, v1::RedriveState::Cancelled);
        assert_eq!(next(&jobs, &letters), None);
        let another = next(&jobs, &[(2, died("docs", 0)), (3, died("docs", 0))]).unwrap();
        assert_eq!(another.1, [3]);
    }

    #[test]
    fn a_job_is_bounded_and_those_that_have_ended_are_superseded() {
        let letters: Vec<_> = (0..10_002).map(|offset| (offset, died("docs", 0))).collect();
        let (first, offsets) = next(&Jobs::default(), &letters).unwrap();
        assert!(first.redrive.unwrap().has_more);
        assert_eq!(offsets.len(), MAX_ITEMS);
        let mut jobs = Jobs::default();
        let planned = next(&jobs, &letters[..1]).unwrap();
        for number in 10..25 {
            let done = u32::from(number != 12);
            add(
                &mut jobs,
                &number.to_string(),
                &planned,
                done,
                v1::RedriveState::Cancelled,
            );
        }
        // The one that was cancelled is no report of a success.
        let superseded = |jobs: &Jobs| superseded("docs", jobs).into_iter().collect::<Vec<_>>();
        assert_eq!(superseded(&jobs), ["10", "11", "13", "14"]);
        let of_one = |offset| next(&Jobs::default(), &[(offset, died("docs", 0))]).unwrap();
        for number in 50..61 {
            add(
                &mut jobs,
                &number.to_string(),
                &of_one(number),
                0,
                v1::RedriveState::Cancelled,
            );
        }
        let with_cancelled = ["10", "11", "12", "13", "14", "50"];
        assert_eq!(superseded(&jobs), with_cancelled);
        let cancelled = jobs.get("50").unwrap();
        assert_eq!(
            not_done(cancelled, &cancelled.job().unwrap()),
            [item("docs-dlq", 50)]
        );
        // What is running is neither.
        add(&mut jobs, "70", &of_one(70), 0, v1::RedriveState::Running);
        assert_eq!(superseded(&jobs), with_cancelled);
        // No job takes again what another one keeps.
        let further = job::chunks(&[item("docs-dlq", 50)]).remove(0);
        jobs.apply(&record(&plan_key("70", 1), Some(further.encode_to_vec().into())));
        for id in with_cancelled {
            for key in jobs.get(id).unwrap().keys(id) {
                jobs.apply(&record(&key, None));
            }
        }
        add(&mut jobs, "70", &of_one(70), 1, v1::RedriveState::Running);
        assert_eq!(next(&jobs, &[(50, died("docs", 0)), (70, died("docs", 0))]), None);
        assert_eq!(next(&jobs, &[(49, died("docs", 0))]).unwrap().1, [49]);
        let mut of_callers = planned.clone();
        of_callers.0.redrive.as_mut().unwrap().automatic_pipeline.clear();
        for number in 30..45 {
            add(
                &mut jobs,
                &number.to_string(),
                &of_callers,
                1,
                v1::RedriveState::Running,
            );
        }
        assert_eq!(super::superseded("", &jobs), BTreeSet::new());
    }

    #[test]
    fn the_filter_names_topic_age_and_failures_and_can_be_parsed() {
        let mut rule = rule();
        assert_eq!(
            rule.filter(NOW),
            "topic = \"docs-dlq\" AND dead_at <= \"2023-11-14T21:13:20.000Z\""
        );
        rule.settings.error_classes = vec!["exhausted".to_owned(), "expired".to_owned()];
        rule.settings.error_codes = vec!["http.503".to_owned()];
        let filter = rule.filter(NOW);
        let expected =
            " AND (error_class = \"exhausted\" OR error_class = \"expired\") AND (error_code = \"http.503\")";
        assert!(filter.ends_with(expected), "{filter}");
        crate::filter::parse(&filter, &[]).unwrap();
    }
}
