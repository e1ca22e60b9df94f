//! `GetWaitingRecord`, `ActOnWaitingRecords` and `GetWaitingActions`: single records that wait in tiers; the first one also finds those of the scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::pipeline::parse_retry_topic;
use redeliver_core::{HumanDuration, JobId, Pipeline, Position};
use redeliver_kafka::lookup::StoredRecord;
use redeliver_kafka::reader::ReadError;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::error::{invalid, reasons, status};
use redeliver_proto::{Message as _, long_wait, v1};
use redeliver_service::audit::{self, AuditLog};
use redeliver_service::edit::Edit;
use redeliver_service::waiting_actions::{
    MAX_RECORDS, NewRequest, Passed, Refused, Request, TierPartition, WaitingActions, is_request_id,
};
use redeliver_store::{ChangeError, Replica, Writer};
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::super::outcomes::job_of;
use super::super::value::{RecordValue, shown};
use super::super::{Api, blocking, bounded, convert, group_changes, kafka_unavailable};
use super::{Selection, record_message, requested_position, scan_failed, too_many_scans};
use crate::access::Viewer;
use crate::audit::Disclosure;
use crate::letter::content_hash;
use crate::waiting::Place;
use crate::waiting::facts::Visible;
use crate::waiting::page::{Details, Listing, Row};
use crate::waiting::scans::{job_id, with_slack};
use crate::waiting::tally::{Detail, Found, job_of_command};

/// The maximum size of a request, in bytes: it is one record of Kafka.
const MAX_REQUEST: usize = 900 << 10;

/// The requests. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ActionRequests {
    pub(crate) replica: Replica<WaitingActions>,
    pub(crate) writer: Writer<NewRequest>,
    pub(crate) audit: AuditLog,
    /// Their topic.
    pub(crate) topic: String,
}

/// A tier of a pipeline.
struct Tier {
    pipeline: Pipeline,
    delay: HumanDuration,
}

impl Api {
    pub(super) async fn waiting_record(
        &self,
        viewer: &Viewer,
        request: v1::GetWaitingRecordRequest,
    ) -> Result<v1::WaitingRecordContents, Status> {
        let (pipeline, place, job, stored) = match (request.position, &*request.job_id) {
            (position, "") => {
                let position = requested_position(position)?;
                let Tier { pipeline, delay } = self.tier_of(viewer, &position.topic)?;
                let stored = self.waiting_at(delay, &position).await?;
                (pipeline, Place::Tier(delay), None, stored)
            }
            (None, job) => {
                let (pipeline, job, stored) = self.long_wait(viewer, job).await?;
                (pipeline, Place::Scheduler, Some(job), stored)
            }
            (Some(_), _) => {
                let problem = "must not be set together with job_id";
                return Err(invalid("position", problem, "POSITION_INVALID", []));
            }
        };
        let position = stored.record.position.clone();
        let topic = pipeline.dead_letter_topic();
        let value = stored.record.value.clone().map(|bytes| RecordValue {
            topic: topic.clone(),
            bytes,
        });
        let value = shown(viewer, vec![value]).await?.pop().flatten();
        let contents = convert::contents(viewer, &topic, &stored, value);
        if contents.payload_withheld() == v1::PayloadWithheld::Unspecified {
            let disclosure = Disclosure {
                target: job.map_or_else(|| position.to_string(), |job| job.to_string()),
                count: 1,
                is_masked: contents.masked.is_some(),
                ..Disclosure::new(audit::Action::GetWaitingRecord)
            };
            self.audit.record(viewer, disclosure, self.clock.now()).await?;
        }
        let mask = viewer.mask(&topic);
        let key_withheld = !viewer.sees_payloads(&topic) || mask.has_key();
        let visible = Visible::of(&stored.record, &mask);
        let row = Row {
            pipeline: 0,
            place,
            position,
            job,
            facts: visible.facts(&stored.record, true, self.clock.now()),
            rank: 0,
            details: Details {
                message: visible.message(),
                key: None,
            },
        };
        Ok(v1::WaitingRecordContents {
            record: Some(v1::WaitingRecord {
                key: contents.key.clone(),
                key_truncated: contents.key_truncated,
                key_withheld,
                ..record_message(&row, &pipeline)
            }),
            contents: Some(contents),
        })
    }

    pub(super) async fn act(
        &self,
        viewer: &Viewer,
        mut request: v1::ActOnWaitingRecordsRequest,
    ) -> Result<v1::WaitingActions, Status> {
        group_changes::check_reason("reason", &request.reason)?;
        let action = request.action();
        if action == v1::WaitingAction::Unspecified {
            let problem = "must be 1 (retry), 2 (dead) or 3 (edit)";
            return Err(invalid("action", problem, "ACTION_INVALID", []));
        }
        let id = std::mem::take(&mut request.request_id);
        if !is_request_id(&id) {
            let problem = "must have 1 to 100 letters, digits, - and _";
            return Err(invalid("request_id", problem, "REQUEST_ID_INVALID", []));
        }
        let hash = Bytes::copy_from_slice(&Sha256::digest(request.encode_to_vec()));
        if let Some(known) = self.actions()?.request(&id)
            && !request.dry_run
        {
            let is_same = known.record().request_hash == hash && known.record().by == viewer.name().as_str();
            return is_same
                .then(|| self.outcomes_of(viewer, known))
                .ok_or_else(id_used)?;
        }
        let edit = self.edit_of(&mut request)?;
        let (positions, matching) = match request.filter.take() {
            Some(filter) if request.positions.is_empty() => {
                self.matching_in_tiers(viewer, filter, request.max_records)
                    .await?
            }
            Some(_) => {
                let problem = "must not be set together with positions";
                return Err(invalid("filter", problem, "FILTER_INVALID", []));
            }
            None => {
                let positions = std::mem::take(&mut request.positions).into_iter();
                let positions = positions.map(|position| requested_position(Some(position)));
                (positions.collect::<Result<BTreeSet<_>, _>>()?, 0)
            }
        };
        if positions.len() > MAX_RECORDS || (positions.is_empty() && matching == 0 && !request.dry_run) {
            let problem = format!("must select 1 to {MAX_RECORDS} records");
            return Err(invalid("positions", problem, "POSITION_INVALID", []));
        }
        let topics: BTreeSet<&Arc<str>> = positions.iter().map(|position| &position.topic).collect();
        let mut tiers = BTreeMap::new();
        for topic in topics {
            let tier = self.tier_of(viewer, topic)?;
            let dead_letters = tier.pipeline.dead_letter_topic();
            viewer.require_operating([&*dead_letters].into_iter())?;
            if edit.is_some() {
                viewer.require_editing(&dead_letters)?;
            }
            tiers.insert(topic.clone(), tier);
        }
        if edit.is_some() {
            self.check_seen(&tiers, &positions, &request.content_hash).await?;
        }
        let record = v1::WaitingRequestRecord {
            action: action.into(),
            edit: edit.as_ref().map(Edit::to_record),
            by: viewer.name().to_string(),
            reason: request.reason,
            at: Some(to_timestamp(self.clock.now())),
            request_hash: hash,
            ..v1::WaitingRequestRecord::default()
        };
        if request.dry_run {
            return Ok(v1::WaitingActions {
                request_id: id,
                action: record.action,
                by: record.by,
                reason: record.reason,
                time: record.at,
                records: u32::try_from(positions.len()).unwrap_or(u32::MAX),
                matching,
                ..v1::WaitingActions::default()
            });
        }
        let (passed, partitions) = self.partitions_of(tiers, positions).await?;
        let record = v1::WaitingRequestRecord { partitions, ..record };
        if record.encoded_len() > MAX_REQUEST {
            let problem = format!("takes more than {MAX_REQUEST} bytes with the rest of the request");
            return Err(invalid("edit", problem, "EDIT_TOO_LARGE", []));
        }
        let request =
            Request::read(&id, record).map_err(|_| Status::internal("the request cannot be read back"))?;
        let changed = self.requests.writer.change(NewRequest {
            request,
            passed: passed.into(),
            audit: self.requests.audit.clone(),
        });
        let changed = changed.await.map_err(|error| not_requested(&error))?;
        let request = changed.document.ok_or_else(|| no_request(&id))?;
        Ok(v1::WaitingActions {
            matching,
            ..self.outcomes_of(viewer, &request)?
        })
    }

    pub(super) fn actions_of(&self, viewer: &Viewer, id: &str) -> Result<v1::WaitingActions, Status> {
        let actions = self.actions()?;
        let found = actions.request(id).ok_or_else(|| no_request(id))?;
        let answer = self.outcomes_of(viewer, found)?;
        if answer.records == 0 {
            return Err(no_request(id));
        }
        Ok(answer)
    }

    fn actions(&self) -> Result<Arc<WaitingActions>, Status> {
        let ActionRequests { replica, topic, .. } = &self.requests;
        replica.state().ok_or_else(|| {
            let problem = replica.problem(Duration::MAX).unwrap_or_default();
            let text = format!("the actions topic `{topic}` is not known yet: {problem}");
            status(Code::Unavailable, text, "ACTIONS_UNKNOWN", [])
        })
    }

    /// What has become of the records of a request that the caller sees.
    fn outcomes_of(&self, viewer: &Viewer, request: &Request) -> Result<v1::WaitingActions, Status> {
        let actions = self.actions()?;
        let (mut acted, mut sees_all) = (Vec::new(), true);
        for (partition, offsets) in request.partitions() {
            let pipeline = parse_retry_topic(&partition.topic).map(|(name, _)| Pipeline::new(name));
            if !pipeline.is_some_and(|pipeline| viewer.sees(&pipeline.dead_letter_topic())) {
                sees_all = false;
                continue;
            }
            acted.extend(
                offsets
                    .iter()
                    .map(|offset| outcome(&actions, request, &partition, *offset)),
            );
        }
        let is_pending = |acted: &&v1::WaitingActed| acted.state() == v1::WaitingActionState::Unspecified;
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let record = request.record();
        Ok(v1::WaitingActions {
            request_id: request.id().to_owned(),
            action: record.action,
            by: if sees_all {
                record.by.clone()
            } else {
                String::new()
            },
            reason: if sees_all {
                record.reason.clone()
            } else {
                String::new()
            },
            time: record.at,
            records: count(acted.len()),
            pending: count(acted.iter().filter(is_pending).count()),
            matching: 0,
            acted,
        })
    }

    /// The tier whose records wait in a topic, if the caller sees its pipeline.
    fn tier_of(&self, viewer: &Viewer, topic: &str) -> Result<Tier, Status> {
        let Some((name, Some(delay))) = parse_retry_topic(topic) else {
            let problem = "is in no topic of a tier; what waits with the scheduler is named by its job_id, and JobService.ActOnLongWait retries it or moves it to the dead letters";
            return Err(invalid("position", problem, "POSITION_INVALID", []));
        };
        let pipeline = self.pipelines(viewer, name)?.into_iter().next();
        let pipeline = pipeline.filter(|pipeline| *pipeline.tier_topic(delay) == *topic);
        let pipeline = pipeline.ok_or_else(|| not_waiting(topic))?;
        Ok(Tier { pipeline, delay })
    }

    /// The record at a position, which its tier has not passed.
    async fn waiting_at(&self, delay: HumanDuration, position: &Position) -> Result<StoredRecord, Status> {
        let (scans, topics) = (self.scans.clone(), [(delay, position.topic.clone())]);
        let passed = blocking(move || scans.passed(&topics))
            .await?
            .map_err(|error| scan_failed(&error))?;
        let is_moved = self.actions()?.is_moved(position, &passed.ids);
        let found = self.lookups.get(vec![position.clone()]).await;
        let found = found.map_err(|error| kafka_unavailable(&error))?.pop().flatten();
        found
            .filter(|_| passed.positions.is_unread(position) && !is_moved)
            .ok_or_else(|| not_waiting(&position.to_string()))
    }

    /// The record that waits with the scheduler as this job.
    async fn long_wait(&self, viewer: &Viewer, job: &str) -> Result<(Pipeline, JobId, StoredRecord), Status> {
        let job = job_of("job_id", job)?;
        let filter = v1::WaitingFilter {
            place: Place::Scheduler.to_string(),
            ..v1::WaitingFilter::default()
        };
        let mut found = None;
        // The scheduler writes nothing about a job before its request. If clocks differ by more than the slack, all of the partition is read.
        for since in [Some(with_slack(job.requested_at())), None] {
            let mut selection = self.waiting_selection(viewer, filter.clone())?;
            (selection.filter.job, selection.filter.states_since) = (Some(job), since);
            let pipelines = selection.pipelines.clone();
            let row = self.rows(viewer, selection, 1).await?.rows.pop();
            found = row.map(|row| (pipelines[row.pipeline].clone(), row.position));
            if found.is_some() {
                break;
            }
        }
        let not_found = || {
            let text = format!("no record waits with the scheduler as job {job}");
            status(Code::NotFound, text, "RECORD_NOT_FOUND", [])
        };
        let (pipeline, position) = found.ok_or_else(not_found)?;
        let found = self.lookups.get(vec![position]).await;
        let found = found.map_err(|error| kafka_unavailable(&error))?.pop().flatten();
        let unwrapped = found.and_then(|stored| {
            let ((name, record), found) = match long_wait::unwrap_any_state(&stored.record) {
                Some(state) => (state, job_id(&stored.record)),
                None => (
                    long_wait::unwrap_any(&stored.record)?,
                    job_of_command(&stored.record),
                ),
            };
            // Another record can be there by now, of a topic that was created again.
            let is_same = found == Some(job) && *name == *pipeline.name;
            is_same.then_some(StoredRecord { record, ..stored })
        });
        let stored = unwrapped.ok_or_else(not_found)?;
        Ok((pipeline, job, stored))
    }

    fn edit_of(&self, request: &mut v1::ActOnWaitingRecordsRequest) -> Result<Option<Edit>, Status> {
        let wrong = |problem: String| invalid("edit", problem, "EDIT_INVALID", []);
        match (request.action(), request.edit.take()) {
            (v1::WaitingAction::Edit, edit) => {
                self.check_accepts_edits()?;
                if request.positions.len() != 1 || request.filter.is_some() {
                    return Err(wrong("is of one position".to_owned()));
                }
                let edit = Edit::read(edit.unwrap_or_default());
                edit.map(Some).map_err(|error| wrong(error.to_string()))
            }
            (_, None) => Ok(None),
            (_, Some(_)) => Err(wrong("is only for the action 3 (edit)".to_owned())),
        }
    }

    /// Refuses an edit of a record that the caller has not seen as it is.
    async fn check_seen(
        &self,
        tiers: &BTreeMap<Arc<str>, Tier>,
        positions: &BTreeSet<Position>,
        seen: &[u8],
    ) -> Result<(), Status> {
        for position in positions {
            let stored = self.waiting_at(tiers[&position.topic].delay, position).await?;
            if seen != content_hash(&stored.record) {
                let text = format!(
                    "the record at {position} has another content_hash; look at it again before you edit it"
                );
                return Err(status(Code::Aborted, text, "RECORD_CHANGED", []));
            }
        }
        Ok(())
    }

    /// The records in tiers that match a filter now, those that are due first, and how many match.
    async fn matching_in_tiers(
        &self,
        viewer: &Viewer,
        filter: v1::WaitingFilter,
        limit: u32,
    ) -> Result<(BTreeSet<Position>, u64), Status> {
        let limit = usize::try_from(limit)
            .ok()
            .filter(|limit| (1..=MAX_RECORDS).contains(limit));
        let problem = format!("must be 1 to {MAX_RECORDS}");
        let limit = limit.ok_or_else(|| invalid("max_records", problem, "FILTER_INVALID", []))?;
        let mut selection = self.waiting_selection(viewer, filter)?;
        selection.filter.in_tiers = true;
        let found = self.rows(viewer, selection, limit).await?;
        let matching = found.counts.values().map(|counts| counts.records).sum();
        Ok((found.rows.into_iter().map(|row| row.position).collect(), matching))
    }

    /// A scan for the first rows, which ends with its caller.
    async fn rows(&self, viewer: &Viewer, selection: Selection, limit: usize) -> Result<Found, Status> {
        let listing = Listing {
            limit,
            keys: vec![false; selection.pipelines.len()],
            ..Listing::default()
        };
        let permit = self.scans.limit.enter().await.ok_or_else(too_many_scans)?;
        let (scans, viewer, cancelled) = (self.scans.clone(), viewer.clone(), CancellationToken::new());
        let _ends_with_its_caller = cancelled.clone().drop_guard();
        let found = blocking(move || {
            let _permit = permit;
            let (pipelines, filter) = (&selection.pipelines, selection.filter.clone());
            scans.waiting(
                &viewer,
                pipelines,
                filter,
                Detail::Rows(listing),
                selection.now,
                &mut |_| match cancelled.is_cancelled() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                },
            )
        });
        found.await?.map_err(|error| scan_failed(&error))
    }

    /// The records of a request by partition, which must have been written, and what makes room for it.
    async fn partitions_of(
        &self,
        tiers: BTreeMap<Arc<str>, Tier>,
        positions: BTreeSet<Position>,
    ) -> Result<(Passed, Vec<v1::WaitingPartition>), Status> {
        let mut topics: BTreeSet<(HumanDuration, Arc<str>)> = tiers
            .iter()
            .map(|(topic, tier)| (tier.delay, topic.clone()))
            .collect();
        for request in self.actions()?.requests() {
            topics.extend(request.partitions().filter_map(|(partition, _)| {
                let (_, delay) = parse_retry_topic(&partition.topic)?;
                Some((delay?, partition.topic))
            }));
        }
        let wanted: BTreeSet<(Arc<str>, i32)> = positions
            .iter()
            .map(|position| (position.topic.clone(), position.partition))
            .collect();
        let (wanted, topics): (Vec<_>, Vec<_>) = (wanted.into_iter().collect(), topics.into_iter().collect());
        let (scans, own) = (self.scans.clone(), self.requests.topic.clone());
        let looked_up = blocking(move || {
            let (passed, ends) = (scans.passed(&topics)?, scans.ends(&wanted)?);
            let knows_all = wanted.iter().all(|(topic, _)| passed.ids.contains_key(&**topic));
            // It was read, so it exists.
            let has_ids = knows_all || scans.has_id(&own)?;
            Ok::<_, ReadError>((passed, ends, has_ids))
        });
        let (passed, ends, has_ids) = looked_up.await?.map_err(|error| scan_failed(&error))?;
        let mut partitions: BTreeMap<(Arc<str>, i32), v1::WaitingPartition> = BTreeMap::new();
        for position in positions {
            let key = (position.topic.clone(), position.partition);
            if ends.get(&key).is_none_or(|end| position.offset >= *end) {
                return Err(not_waiting(&position.to_string()));
            }
            // Without it, the request could be about records of another topic of the same name.
            let id = passed.ids.get(&*position.topic);
            let id = id.ok_or_else(|| no_id(&position.topic, has_ids))?;
            let partition = partitions.entry(key).or_insert_with(|| v1::WaitingPartition {
                topic: position.topic.to_string(),
                topic_id: Bytes::copy_from_slice(&id.bits().to_be_bytes()),
                partition: position.partition,
                offsets: Vec::new(),
            });
            partition.offsets.push(position.offset);
        }
        Ok((passed, partitions.into_values().collect()))
    }
}

fn outcome(
    actions: &WaitingActions,
    request: &Request,
    partition: &TierPartition,
    offset: i64,
) -> v1::WaitingActed {
    let position = Position {
        topic: partition.topic.clone(),
        partition: partition.partition,
        offset,
    };
    let mut acted = v1::WaitingActed {
        position: Some((&position).into()),
        ..v1::WaitingActed::default()
    };
    match actions.done(partition, offset) {
        Some(done) if done.request_id == request.id() => {
            acted.state = done.state;
            acted.written.clone_from(&done.written);
            acted.problem.clone_from(&done.problem);
            acted.time = done.time;
        }
        Some(done) => {
            acted.set_state(v1::WaitingActionState::Gone);
            acted.problem = format!("the request {} was first", done.request_id);
            acted.time = done.time;
        }
        None => {}
    }
    acted
}

fn not_waiting(what: &str) -> Status {
    let text = format!("no record waits at {}", bounded(what));
    status(Code::NotFound, text, "RECORD_NOT_FOUND", [])
}

/// The id of a topic is unknown. `has_ids`: whether the broker has ids.
fn no_id(topic: &str, has_ids: bool) -> Status {
    if has_ids {
        let text = format!("the broker does not tell the id of the topic `{topic}`; retry later");
        return status(Code::Unavailable, text, "KAFKA_UNAVAILABLE", []);
    }
    let text =
        "the broker has no topic ids, which actions on single waiting records need; use Kafka 2.8 or later";
    status(Code::FailedPrecondition, text, "TOPIC_IDS_MISSING", [])
}

fn no_request(id: &str) -> Status {
    let text = format!("no such request: `{}`; it may have been removed", bounded(id));
    status(Code::NotFound, text, "REQUEST_NOT_FOUND", [])
}

fn id_used() -> Status {
    invalid("request_id", Refused::IdUsed.to_string(), "REQUEST_ID_USED", [])
}

fn not_requested(error: &ChangeError<Request, Refused>) -> Status {
    let (code, reason) = match error {
        ChangeError::Refused(Refused::IdUsed) | ChangeError::Revised(_) | ChangeError::Unsupported(_) => {
            return id_used();
        }
        ChangeError::Refused(full @ Refused::TooMany) => {
            return status(Code::ResourceExhausted, full.to_string(), "TOO_MANY_ACTIONS", []);
        }
        ChangeError::Unavailable(_) => (Code::Unavailable, "KAFKA_UNAVAILABLE"),
        ChangeError::Unconfirmed(_) => (Code::Unknown, reasons::UNCONFIRMED),
    };
    status(code, error.to_string(), reason, [])
}
