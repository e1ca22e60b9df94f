//! `FindRecords`.

use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Position, Timestamp};
use redeliver_proto::convert::{from_timestamp, time_of_record, to_timestamp};
use redeliver_proto::error::invalid;
use redeliver_proto::v1;
use redeliver_proto::v1::find_records_request::By;
use redeliver_runtime::config::{is_pointer, pointer_problem};
use rusqlite::Connection;
use tokio::runtime::Handle;
use tonic::Status;

use super::super::list::INDEX_BYTES;
use super::super::{Api, ResponseStream, convert};
use super::{Work, scan_failed};
use crate::access::{LimitedFilter, Viewer};
use crate::dialect::Facts;
use crate::filter::{Expr, MAX_LENGTH, Restriction, TextField, TextTest};
use crate::index::{self, Direction, Page, PageLimit};
use crate::waiting::scans::find::{FoundCopy, Question};
use crate::waiting::timeline::{Location, Outcome};
use crate::waiting::wanted::{Best, MAX_FOUND, Wanted};

/// How far topics are searched back unless the request says it, in milliseconds.
const AGE: i64 = 86_400_000;
const DEAD_LETTERS: Location = Location::Topic(TopicRole::DeadLetter);

/// Where to search.
struct Searched {
    pipelines: Vec<Pipeline>,
    /// The dead letters in the index.
    letters: LimitedFilter,
    /// What is not searched, and why.
    gaps: Vec<String>,
}

/// Dead letters of the index.
enum Letters {
    /// The newest ones.
    Matching(LimitedFilter),
    /// Those that were found in their topics: the index knows what was decided about them.
    At(Vec<Position>),
}

impl Letters {
    fn read(&self, connection: &Connection) -> rusqlite::Result<Page> {
        match self {
            Self::Matching(filter) => {
                let limit = PageLimit {
                    letters: MAX_FOUND,
                    bytes: INDEX_BYTES,
                };
                let filter = filter.resolve(connection)?;
                index::list(connection, &filter, Direction::Descending, None, limit)
            }
            Self::At(ids) => {
                let letters = ids.iter().filter_map(|id| index::get(connection, id).transpose());
                Ok(Page {
                    letters: letters.collect::<Result<_, _>>()?,
                    has_more: false,
                })
            }
        }
    }
}

impl Api {
    pub(super) async fn found_records(
        &self,
        viewer: &Viewer,
        request: v1::FindRecordsRequest,
    ) -> Result<ResponseStream<v1::FindRecordsResponse>, Status> {
        use v1::find_records_response::Event;
        let wanted = wanted(request.by)?;
        let now = self.clock.now();
        let since = match request.since {
            None => Timestamp::from_millis(now.as_millis().saturating_sub(AGE)),
            Some(since) => from_timestamp(&since)
                .ok_or_else(|| invalid("since", "is not in the years 1 to 9999", "FILTER_INVALID", []))?,
        };
        let Searched {
            pipelines,
            letters,
            mut gaps,
        } = self.searched(viewer, &request.pipeline, &wanted)?;
        let is_indexed = !matches!(&wanted, Wanted::Field(pointer, _) if !self.json_fields.contains(pointer));
        let question = Question {
            wanted,
            pipelines,
            since,
            reads_letters: !is_indexed,
            now,
        };
        let completeness = self.completeness();
        let (api, of_viewer, runtime) = (self.clone(), viewer.clone(), Handle::current());
        let scan: Work<v1::FoundRecords> = Box::new(move |on_progress| {
            let mut best = Best::new();
            let pipelines = &question.pipelines;
            let to_found = |found| found_message(found, pipelines);
            let cut = api
                .scans
                .find(&of_viewer, &question, &mut best, to_found, on_progress);
            for (topic, newest) in cut.map_err(|error| scan_failed(&error))? {
                gaps.push(format!(
                    "only the newest {newest} offsets of {topic} were searched"
                ));
            }
            let letters = match is_indexed {
                true => Letters::Matching(letters),
                false => Letters::At(dead_letters(best.copies())),
            };
            runtime.block_on(api.add_letters(&of_viewer, letters, pipelines, &mut best))?;
            let (records, truncated) = best.finish();
            let completeness = api.completeness_since(&completeness);
            Ok(v1::FoundRecords {
                records,
                truncated,
                searched_since: Some(to_timestamp(since)),
                gaps,
                completeness: Some(api.completeness_message(&completeness, &of_viewer)),
            })
        });
        let event = |event| v1::FindRecordsResponse { event: Some(event) };
        self.stream(
            viewer,
            scan,
            move |progress| event(Event::Progress(progress)),
            move |found| event(Event::Found(found)),
        )
        .await
    }

    /// Refuses a pipeline with a name if its caller may not find anything in it.
    fn searched(&self, viewer: &Viewer, name: &str, wanted: &Wanted) -> Result<Searched, Status> {
        let pipelines = self.pipelines(viewer, name)?;
        let restriction = wanted.restriction();
        let mut filter = Expr::Is(restriction.clone());
        if !name.is_empty() {
            let topic = Pipeline::new(name).dead_letter_topic();
            viewer.require_payloads(&topic)?;
            let mask = viewer.mask(&topic);
            if mask.hides_tested(&restriction) || mask.hides_origin() {
                viewer.require_unmasked(&topic)?;
            }
            let of_topic = Restriction::Text(TextField::Topic, TextTest::Equal(topic.to_string()));
            filter = Expr::And(vec![Expr::Is(of_topic), filter]);
        }
        let letters = viewer.limit(filter)?;
        let (pipelines, hidden): (_, Vec<Pipeline>) = pipelines.into_iter().partition(|pipeline| {
            let topic = pipeline.dead_letter_topic();
            letters.can_match_in(&topic) && !viewer.mask(&topic).hides_origin()
        });
        let gaps = hidden.iter().map(|pipeline| {
            let name = &pipeline.name;
            format!(
                "the topics of {name} were not searched: payloads are withheld, or what is needed is masked"
            )
        });
        Ok(Searched {
            gaps: gaps.collect(),
            pipelines,
            letters,
        })
    }

    /// Adds dead letters, with what was decided about them.
    async fn add_letters(
        &self,
        viewer: &Viewer,
        letters: Letters,
        pipelines: &[Pipeline],
        best: &mut Best<v1::FoundRecord>,
    ) -> Result<(), Status> {
        let before = self.completeness();
        let page = self.pool.query(move |connection| letters.read(connection));
        let page = page.await?;
        if page.has_more {
            best.truncate();
        }
        let are_states_known = self.completeness_since(&before).are_states_known();
        for letter in &page.letters {
            let of_topic = |pipeline: &Pipeline| *pipeline.dead_letter_topic() == *letter.id.topic;
            let of_pipeline = pipelines.iter().position(of_topic).zip(origin(&letter.facts));
            let id = match of_pipeline {
                Some((pipeline, origin)) => (Some(pipeline), origin),
                None => (None, letter.id.clone()),
            };
            let message = convert::basic(viewer, letter, are_states_known);
            let outcome = match message.state() {
                v1::DeadLetterState::Open => Outcome::Dead,
                v1::DeadLetterState::Discarded => Outcome::Discarded,
                // What a redrive has written was found, or does not match.
                v1::DeadLetterState::Redriven | v1::DeadLetterState::Unspecified => Outcome::Unknown,
            };
            best.add(
                id,
                outcome,
                Some(letter.dead_at),
                letter_message(message, outcome),
            );
        }
        Ok(())
    }
}

fn wanted(by: Option<By>) -> Result<Wanted, Status> {
    let wrong = |field, problem: String| invalid(field, problem, "FILTER_INVALID", []);
    let (field, wanted, size) = match by {
        None => return Err(wrong("by", "must be a key, a header or a field".to_owned())),
        Some(By::Key(key)) => {
            let size = key.len();
            ("key", Wanted::Key(key), size)
        }
        Some(By::Header(v1::NamedText { name, value })) => {
            let size = name.len() + value.len();
            ("header", Wanted::Header(name, value), size)
        }
        Some(By::Field(v1::NamedText { name, .. })) if !is_pointer(&name) => {
            return Err(wrong("field", pointer_problem(&name)));
        }
        Some(By::Field(v1::NamedText { name, value })) => {
            let size = name.len() + value.len();
            ("field", Wanted::Field(name, value), size)
        }
    };
    if size > MAX_LENGTH {
        return Err(wrong(field, format!("must have at most {MAX_LENGTH} bytes")));
    }
    Ok(wanted)
}

/// The ids of the dead letters among what was found.
fn dead_letters<'f>(found: impl Iterator<Item = &'f v1::FoundRecord>) -> Vec<Position> {
    let place = DEAD_LETTERS.to_string();
    let letters = found.filter(|found| found.place == place);
    letters
        .filter_map(|letter| letter.position.clone())
        .map(Into::into)
        .collect()
}

/// Where a dead letter entered its pipeline.
fn origin(facts: &Facts) -> Option<Position> {
    let origin = facts.origin.as_ref()?;
    Some(Position {
        topic: origin.topic.as_str().into(),
        partition: origin.partition?,
        offset: origin.offset?,
    })
}

fn found_message(found: FoundCopy, pipelines: &[Pipeline]) -> v1::FoundRecord {
    let facts = found.facts;
    let due = facts.due.filter(|_| found.outcome == Outcome::Waits);
    v1::FoundRecord {
        pipeline: pipelines[found.pipeline].name.to_string(),
        outcome: found.outcome.into(),
        place: found.location.to_string(),
        position: Some((&found.position).into()),
        time: facts.written.and_then(time_of_record),
        origin: found.origin.as_ref().map(Into::into),
        due_at: due.and_then(time_of_record),
        attempts: facts.attempts.unwrap_or(0),
        error_class: facts.class.unwrap_or_default(),
        error_code: facts.code.unwrap_or_default(),
    }
}

fn letter_message(letter: v1::DeadLetter, outcome: Outcome) -> v1::FoundRecord {
    v1::FoundRecord {
        pipeline: letter.pipeline,
        outcome: outcome.into(),
        place: DEAD_LETTERS.to_string(),
        position: letter.position,
        time: letter.dead_at,
        origin: letter.origin,
        due_at: None,
        attempts: letter.retry_count,
        error_class: letter.error_class,
        error_code: letter.error_code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_questions_name_their_field() {
        let named = |name: &str, value: &str| v1::NamedText {
            name: name.to_owned(),
            value: value.to_owned(),
        };
        let long = "x".repeat(MAX_LENGTH);
        for (by, field) in [
            (None, "by"),
            (Some(By::Key(format!("{long}x"))), "key"),
            (Some(By::Header(named("a", &long))), "header"),
            (Some(By::Field(named("a", "b"))), "field"),
            (Some(By::Field(named("/a~2", "b"))), "field"),
        ] {
            let status = super::wanted(by).unwrap_err();
            assert!(status.message().starts_with(&format!("{field}: ")), "{status:?}");
        }
        assert_eq!(
            super::wanted(Some(By::Key(String::new()))).unwrap(),
            Wanted::Key(String::new())
        );
    }
}
