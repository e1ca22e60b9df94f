//! Finds records by what is in them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use redeliver_core::headers::Origin;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{JobId, Pipeline, Position, Record, Timestamp};
use redeliver_kafka::backlog::GroupPositions;
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::scan::{Limits, Scan};
use redeliver_proto::long_wait;

use super::{OnProgress, Scans, TIMEOUT, entered, job_id, lineage, masks};
use crate::access::Viewer;
use crate::waiting::Place;
use crate::waiting::facts::{Facts, Visible};
use crate::waiting::timeline::{Location, Outcome};
use crate::waiting::wanted::{Best, Wanted, outcome};

/// How many offsets are read, besides the states of jobs.
const LIMITS: Limits = Limits {
    of_topic: 1_000_000,
    in_all: 20_000_000,
};
/// The maximum number of jobs that a scan remembers. Which of them still wait is known at its end.
const MAX_JOBS: usize = 10_000;

/// What to find.
pub(crate) struct Question {
    pub(crate) wanted: Wanted,
    pub(crate) pipelines: Vec<Pipeline>,
    /// Topics are searched from this time on, and from the first record on that is not complete; dead-letter topics from their beginning.
    pub(crate) since: Timestamp,
    /// Whether dead-letter topics are read, too. What they contain has no outcome.
    pub(crate) reads_letters: bool,
    pub(crate) now: Timestamp,
}

/// A copy that was found.
#[derive(Debug)]
pub(crate) struct FoundCopy {
    /// The number of its pipeline.
    pub(crate) pipeline: usize,
    pub(crate) location: Location,
    pub(crate) outcome: Outcome,
    pub(crate) position: Position,
    /// Where it entered the pipeline.
    pub(crate) origin: Option<Position>,
    pub(crate) facts: Facts,
}

/// The groups that read topics, in rounds in which each topic occurs once, and the round of each pipeline.
fn rounds(
    groups: impl Iterator<Item = Vec<(String, Arc<str>)>>,
) -> (Vec<BTreeMap<Arc<str>, String>>, Vec<usize>) {
    let mut rounds: Vec<BTreeMap<Arc<str>, String>> = Vec::new();
    let mut of_pipelines = Vec::new();
    for groups in groups {
        let fits = |round: &BTreeMap<Arc<str>, String>| {
            let mut groups = groups.iter();
            groups.all(|(group, topic)| round.get(topic).is_none_or(|other| other == group))
        };
        let round = rounds.iter().position(fits).unwrap_or(rounds.len());
        if round == rounds.len() {
            rounds.push(BTreeMap::new());
        }
        rounds[round].extend(groups.into_iter().map(|(group, topic)| (topic, group)));
        of_pipelines.push(round);
    }
    (rounds, of_pipelines)
}

/// Where the record entered the pipeline, and whether it is new there: then its headers are those of whoever has written it.
fn origin_of(pipeline: &Pipeline, location: Location, record: &Record) -> (Option<Position>, bool) {
    let position = |origin: Origin| Position {
        topic: origin.topic,
        partition: origin.partition,
        offset: origin.offset,
    };
    if location != Location::Topic(TopicRole::Source) {
        return (lineage(pipeline, record).map(position), false);
    }
    let arrival = entered(pipeline, record);
    (Some(position(arrival.origin)), arrival.failed_attempts == 0)
}

impl Scans {
    /// Adds what it finds in the topics of pipelines, and returns the topics that were not read as a whole, with how many of their newest offsets were. Blocks.
    pub(crate) fn find<T>(
        &self,
        viewer: &Viewer,
        question: &Question,
        best: &mut Best<T>,
        to_found: impl Fn(FoundCopy) -> T,
        on_progress: OnProgress<'_>,
    ) -> Result<BTreeMap<Arc<str>, u64>, ReadError> {
        let pipelines = &question.pipelines;
        let roles = self.surveyor.roles(pipelines)?;
        let masks = masks(viewer, pipelines);
        let (_, scheduler) = &*self.scheduler;

        let groups = pipelines.iter().zip(&roles);
        let (groups, round_of) = rounds(groups.map(|(pipeline, roles)| self.groups(pipeline, roles)));
        let positions = groups.into_iter().map(|round| {
            let groups: Vec<_> = round.into_iter().map(|(topic, group)| (group, topic)).collect();
            GroupPositions::read(&self.kafka, &groups)
        });
        let positions = positions.collect::<Result<Vec<_>, _>>()?;

        let since = Some(question.since);
        let (mut whole, mut topics) = (Vec::new(), Vec::new());
        if pipelines.iter().any(|pipeline| pipeline.long_waits.is_some()) {
            // Its end is looked up before those of the topics to which jobs are released.
            whole.push((scheduler.state.clone(), None));
            topics.push((scheduler.ingest.clone(), since));
        }
        let mut of_topics: HashMap<Arc<str>, Vec<(usize, TopicRole)>> = HashMap::new();
        for (index, roles) in roles.into_iter().enumerate() {
            for (topic, role) in roles {
                if role != TopicRole::DeadLetter || question.reads_letters {
                    of_topics.entry(topic).or_default().push((index, role));
                }
            }
        }
        topics.extend(of_topics.iter().map(|(topic, roles)| {
            // A dead letter counts whatever its age.
            let is_dead = roles.iter().any(|(_, role)| *role == TopicRole::DeadLetter);
            (topic.clone(), since.filter(|_| !is_dead))
        }));
        let by_name: HashMap<&str, usize> = (0..)
            .zip(pipelines)
            .map(|(index, pipeline)| (&*pipeline.name, index))
            .collect();
        let moved = self.moved(of_topics.keys())?;

        let copy = |pipeline: usize, location, record: &Record, is_unread: bool| {
            let (origin, is_new) = origin_of(&pipelines[pipeline], location, record);
            let id = match &origin {
                Some(origin) => origin.clone(),
                // It may be of somebody else.
                None if location == Location::Topic(TopicRole::Output) => return None,
                None => record.position.clone(),
            };
            let facts = match is_new {
                true => Facts {
                    written: record.timestamp,
                    ..Facts::default()
                },
                false => Visible::of(record, &masks[pipeline]).facts(record, false, question.now),
            };
            let found = FoundCopy {
                pipeline,
                location,
                outcome: outcome(location, is_new, is_unread),
                position: record.position.clone(),
                origin,
                facts,
            };
            Some((id, found))
        };
        let mut add = |(id, found): (Position, FoundCopy)| {
            let (outcome, written) = (found.outcome, found.facts.written);
            best.add((Some(found.pipeline), id), outcome, written, to_found(found));
        };
        // Without their values, which may be large.
        let mut jobs: HashMap<JobId, (Position, FoundCopy)> = HashMap::new();
        let mut is_truncated = false;
        let mut visit = |record: &Record| {
            let topic = &record.position.topic;
            let waiting = |unwrapped: Option<(String, Record)>| {
                let (name, waiting) = unwrapped?;
                let pipeline = *by_name.get(&*name)?;
                question.wanted.is_in(&waiting).then_some((pipeline, waiting))
            };
            if *topic == scheduler.state {
                let Some(id) = job_id(record) else { return };
                match waiting(long_wait::unwrap_any_state(record)) {
                    Some((pipeline, job)) if jobs.len() < MAX_JOBS || jobs.contains_key(&id) => {
                        let found = copy(pipeline, Location::Scheduler, &job, true);
                        jobs.extend(found.map(|found| (id, found)));
                    }
                    Some(_) => is_truncated = true,
                    // It was dispatched, which is a part of its life.
                    None => {
                        if let Some((origin, mut found)) = jobs.remove(&id) {
                            found.outcome = Outcome::Unknown;
                            add((origin, found));
                        }
                    }
                }
            } else if *topic == scheduler.ingest {
                if let Some((pipeline, waiting)) = waiting(long_wait::unwrap_any(record)) {
                    let is_unread = positions[round_of[pipeline]].is_unread(&record.position);
                    let found = copy(pipeline, Location::Scheduler, &waiting, is_unread);
                    found.into_iter().for_each(&mut add);
                }
            } else if question.wanted.is_in(record) {
                for (pipeline, role) in of_topics.get(topic).into_iter().flatten() {
                    let is_read = pipelines[*pipeline].reading_group(*role, "").is_some();
                    let is_unread = is_read
                        && positions[round_of[*pipeline]].is_unread(&record.position)
                        && !moved.contains(&record.position);
                    let found = copy(*pipeline, Location::Topic(*role), record, is_unread);
                    found.into_iter().for_each(&mut add);
                }
            }
        };
        // What waits counts whatever its age. A group that has committed nothing reads from the beginning.
        let waits = |topic: &str| {
            let of_topic = of_topics.get(topic).into_iter().flatten();
            let mut places = of_topic.filter_map(|(_, role)| Place::of(*role));
            *topic == *scheduler.ingest || places.next().is_some()
        };
        let unread = |topic: &str, partition| {
            let first = positions
                .iter()
                .filter_map(|of| of.first_unread(topic, partition));
            first.min().or_else(|| waits(topic).then_some(0))
        };
        let (scan, cut) = Scan::newest(&self.kafka, &whole, &topics, &unread, LIMITS)?;
        scan.run(TIMEOUT, |record, progress| {
            if let Some(record) = &record {
                visit(record);
            }
            on_progress(progress)
        })?;
        jobs.into_values().for_each(add);
        if is_truncated {
            best.truncate();
        }
        Ok(cut)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::headers::write_lineage;
    use redeliver_core::{Headers, HumanDuration};
    use redeliver_testkit::record_at;

    use super::*;

    #[test]
    fn shared_source_needs_another_round() {
        let groups = [
            vec![("w-a", "source"), ("w-a", "a-due"), ("tier-5s", "a-5s")],
            vec![("w-b", "source"), ("w-b", "b-due"), ("tier-5s", "b-5s")],
            vec![("w-c", "other"), ("scheduler", "ingest")],
            vec![("scheduler", "ingest"), ("w-d", "d")],
        ];
        let groups = groups.map(|groups| {
            let groups = groups.into_iter();
            groups
                .map(|(group, topic)| (group.to_owned(), topic.into()))
                .collect()
        });
        let (rounds, of_pipelines) = rounds(groups.into_iter());
        assert_eq!(of_pipelines, [0, 1, 0, 0]);
        let sizes: Vec<usize> = rounds.iter().map(BTreeMap::len).collect();
        assert_eq!(sizes, [6, 3]);
        assert_eq!((&*rounds[0]["source"], &*rounds[1]["source"]), ("w-a", "w-b"));
    }

    #[test]
    fn origin_is_that_of_the_pipeline() {
        let origin = |location, pipeline: &str, record: &Record| {
            let (origin, is_new) = origin_of(&Pipeline::new(pipeline), Location::Topic(location), record);
            (origin.map(|origin| origin.to_string()), is_new)
        };
        let mut headers = Headers::new();
        write_lineage(&mut headers, "p", &Origin::of(&record_at("p", 0, 7)), 1);
        let result = Record {
            headers,
            ..record_at("out", 0, 4)
        };
        let tier = TopicRole::Tier(HumanDuration::from_secs(5));
        for role in [TopicRole::Output, TopicRole::DeadLetter, TopicRole::Due, tier] {
            assert_eq!(
                origin(role, "p", &result),
                (Some("p/0/7".to_owned()), false),
                "{role:?}"
            );
            let foreign = record_at("out", 0, 4);
            assert_eq!(origin(role, "p", &foreign), (None, false), "{role:?}");
        }
        // A result of one pipeline is new in the next.
        assert_eq!(
            origin(TopicRole::Source, "out", &result),
            (Some("out/0/4".to_owned()), true)
        );
    }
}
