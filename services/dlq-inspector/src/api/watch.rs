//! `WatchDeadLetters`: streams existing dead letters, then new ones as they are indexed.
//!
//! A watcher reads each partition in the order of offsets, so that its next offsets say where it goes on, in every index, and the index itself
//! buffers bursts for slow clients. What is read ahead of a client is bounded in bytes, for each watcher and for all of them
//! together: memory is reserved before values are read from Kafka. A watch ends if its client accepts no message for
//! [`SEND_TIMEOUT`], or when the client may no longer read dead letters.

use std::sync::Arc;
use std::time::Duration;

use futures::stream;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::error::status;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_proto::{Message as _, v1};
use redeliver_service::audit::Action;
use redeliver_service::identity::{self, Withdrawn};
use redeliver_service::memory_budget::Reservation;
use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tonic::{Code, Status};

use super::list::{batches, is_full, record_bytes};
use super::progress::Progress;
use super::token::{QueryHash, ResumeToken, query_hash};
use super::{ANSWERS, Api, ResponseStream, WATCHERS, shutting_down};
use crate::access::{LimitedFilter, Viewer};
use crate::audit::Disclosure;
use crate::filter::NumberField;
use crate::index::{self, IndexedLetter, MessageCache, PageLimit, ReadPosition};
use crate::ledger;
use crate::metrics::WatcherGuard;

/// Interval of heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// A watch ends if its client accepts no message for this long.
pub(crate) const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of the messages that the client has not accepted yet, in KiB.
const BUFFER_KIB: u32 = 1 << 10;
/// Maximum number of these messages.
const BUFFER_MESSAGES: usize = 1024;
/// How much is read from the index at once.
const READ_LIMIT: PageLimit = PageLimit {
    letters: 200,
    bytes: 256 << 10,
};
/// Maximum size of the records that are read from Kafka at once, in bytes, unless a single one is larger.
const RECORD_BYTES: u64 = 1 << 20;

/// A message with its share of the buffer of its watcher, which is released once the client accepts it, and the memory of its batch, which
/// is free once the client has accepted all of them.
struct Buffered {
    message: v1::WatchDeadLettersResponse,
    held: (OwnedSemaphorePermit, Option<Reservation>),
}

/// Why a watch ends.
enum WatchEnd {
    ClientGone,
    /// The client receives this status.
    Status(Status),
}

struct Watcher {
    api: Api,
    /// The build of the index that is read. Another one has other ids of texts, which `messages` refers to.
    build: u64,
    viewer: Viewer,
    filter: Arc<LimitedFilter>,
    /// As it is recorded.
    recorded_filter: String,
    messages: Arc<MessageCache>,
    tests_states: bool,
    query: QueryHash,
    is_full: bool,
    progress: Progress,
    /// When the last message was sent.
    last_sent: Instant,
    sender: mpsc::Sender<Result<Buffered, Status>>,
    /// The number of messages that the client has accepted.
    accepted: watch::Receiver<u64>,
    buffer: Arc<Semaphore>,
    _count: WatcherGuard,
    _permit: OwnedSemaphorePermit,
}

impl Api {
    pub(super) async fn watch(
        &self,
        request: &v1::WatchDeadLettersRequest,
        viewer: Viewer,
    ) -> Result<ResponseStream<v1::WatchDeadLettersResponse>, Status> {
        let filter = Arc::new(viewer.limit(self.parse_filter(&request.filter)?)?);
        let query = query_hash(&["watch", &request.filter]);
        let tests_states = filter.written().tests(NumberField::State);
        Self::check_states(tests_states, &self.completeness())?;
        let build = self.shared.build();
        let token = ResumeToken::decode(query, &request.resume_token)?;
        let Ok(permit) = self.limits.watchers.clone().try_acquire_owned() else {
            let text = format!("too many watchers; the limit is {WATCHERS}; retry later");
            return Err(status(Code::ResourceExhausted, text, "TOO_MANY_WATCHERS", []));
        };
        let mut progress = token.unwrap_or_default();
        if request.only_new && request.resume_token.is_empty() {
            for part in progress.unread(self.positions(&filter).await?) {
                progress.pass(&part.topic, part.partition, part.end);
            }
        }
        // One slot is reserved for the final status, so that sending it never blocks.
        let (sender, receiver) = mpsc::channel(BUFFER_MESSAGES + 1);
        let (accepting, accepted) = watch::channel(0);
        let watcher = Watcher {
            api: self.clone(),
            build,
            viewer,
            filter,
            recorded_filter: self.recorded_filter(&request.filter)?,
            messages: Arc::default(),
            tests_states,
            query,
            is_full: is_full(request.view),
            progress,
            last_sent: Instant::now(),
            sender,
            accepted,
            buffer: Arc::new(Semaphore::new(BUFFER_KIB as usize)),
            _count: self.metrics.count_watcher(),
            _permit: permit,
        };
        self.watchers.spawn(watcher.run());
        // The previous message is sent once the next one is asked for. Until then, it holds its memory.
        let state = (receiver, accepting, None);
        let messages = stream::unfold(state, |(mut receiver, accepting, previous)| async move {
            drop(previous);
            let next: Result<Buffered, Status> = receiver.recv().await?;
            accepting.send_modify(|count| *count += 1);
            let (message, previous) = match next {
                Ok(Buffered { message, held }) => (Ok(message), Some(held)),
                Err(status) => (Err(status), None),
            };
            Some((message, (receiver, accepting, previous)))
        });
        Ok(Box::pin(messages))
    }

    async fn positions(&self, filter: &Arc<LimitedFilter>) -> Result<Vec<ReadPosition>, Status> {
        let filter = filter.clone();
        let reading = self.pool.watch(move |connection| positions(connection, &filter));
        Ok(reading.await?)
    }
}

/// Up to where the index contains the partitions in which a filter may match.
fn positions(connection: &Connection, filter: &LimitedFilter) -> rusqlite::Result<Vec<ReadPosition>> {
    let mut positions = index::read_positions(connection)?;
    positions.retain(|position| &*position.topic != ledger::TOPIC && filter.can_match_in(&position.topic));
    Ok(positions)
}

impl Watcher {
    async fn run(mut self) {
        let stop = self.api.stop.clone();
        let sender = self.sender.clone();
        let viewer = self.viewer.clone();
        let end = tokio::select! {
            result = self.watch() => match result {
                Err(end) => end,
                Ok(never) => match never {},
            },
            () = stop.cancelled() => WatchEnd::Status(shutting_down()),
            withdrawn = viewer.withdrawn() => WatchEnd::Status(match withdrawn {
                Withdrawn::Refused(refusal) => identity::grpc::status(&refusal),
                Withdrawn::ScopesChanged => scopes_changed(),
            }),
            () = sender.closed() => WatchEnd::ClientGone,
        };
        if let WatchEnd::Status(status) = end {
            // The reserved slot is free, so that this fails only if the client has gone.
            let _ = sender.try_send(Err(status));
        }
    }

    async fn watch(&mut self) -> Result<std::convert::Infallible, WatchEnd> {
        let mut commits = self.api.shared.commits.subscribe();
        let mut seen = commits.borrow_and_update().last;
        self.send_unread().await?;
        let completeness = Some(self.completeness());
        self.send(Event::Synced(v1::Synced { completeness }), None)
            .await?;
        let mut heartbeats = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = commits.changed() => {
                    if changed.is_err() {
                        return Err(WatchEnd::Status(shutting_down()));
                    }
                    self.check_build()?;
                    let have_added = {
                        let commits = commits.borrow_and_update();
                        let after = std::mem::replace(&mut seen, commits.last);
                        commits.have_added(after, |topic| self.filter.can_match_in(topic))
                    };
                    if have_added {
                        self.send_unread().await?;
                    }
                }
                _ = heartbeats.tick() => {
                    self.check_build()?;
                    self.send_heartbeat().await?;
                }
            }
        }
    }

    fn completeness(&self) -> v1::Completeness {
        self.api
            .completeness_message(&self.api.completeness(), &self.viewer)
    }

    fn check_build(&self) -> Result<(), WatchEnd> {
        if self.api.shared.build() == self.build {
            return Ok(());
        }
        let text = "the index was rebuilt; resume the watch";
        Err(WatchEnd::Status(status(
            Code::Unavailable,
            text,
            "INDEX_REBUILT",
            [],
        )))
    }

    /// Sends the dead letters that match, of all that the index contains now. Sends heartbeats in between, whose tokens skip what does not match.
    async fn send_unread(&mut self) -> Result<(), WatchEnd> {
        for page in 0.. {
            let completeness = self.api.completeness();
            let (filter, messages, progress) =
                (self.filter.clone(), self.messages.clone(), self.progress.clone());
            // In one transaction: a topic that is being removed has no position any more, so that what is missing of it is not passed.
            let reading = self.api.pool.watch(move |connection| {
                let mut progress = progress.clone();
                let mut unread = progress.unread(positions(connection, &filter)?);
                // Each partition has its turn.
                let first = page % unread.len().max(1);
                unread.rotate_left(first);
                let stretch =
                    index::list_unread(connection, filter.written(), &messages, &unread, READ_LIMIT)?;
                Ok((progress, unread, stretch))
            });
            let read = reading.await;
            self.check_build()?;
            let (progress, unread, stretch) = read.map_err(|error| WatchEnd::Status(error.into()))?;
            self.progress = progress;
            if unread.is_empty() {
                break;
            }
            let completeness = self.api.completeness_since(&completeness);
            Api::check_states(self.tests_states, &completeness).map_err(WatchEnd::Status)?;
            let are_states_known = completeness.are_states_known();
            let letters = &stretch.letters;
            if self.is_full {
                for batch in batches(letters, RECORD_BYTES) {
                    self.send_batch(batch, are_states_known).await?;
                }
            } else if !letters.is_empty() {
                self.send_batch(letters, are_states_known).await?;
            }
            for (part, next) in unread.iter().zip(&stretch.next) {
                self.progress.pass(&part.topic, part.partition, *next);
            }
            if unread.iter().map(|part| part.end).eq(stretch.next) {
                break;
            }
            if letters.is_empty() || self.last_sent.elapsed() >= HEARTBEAT {
                self.send_heartbeat().await?;
            }
        }
        Ok(())
    }

    async fn send_batch(
        &mut self,
        letters: &[IndexedLetter],
        are_states_known: bool,
    ) -> Result<(), WatchEnd> {
        let indexed: usize = letters.iter().map(IndexedLetter::size).sum();
        let read = if self.is_full { record_bytes(letters) } else { 0 };
        let reserved = self.reserve(read.saturating_add(indexed as u64)).await?;
        let messages = self
            .api
            .to_messages(&self.viewer, letters, self.is_full, are_states_known)
            .await
            .map_err(WatchEnd::Status)?;
        if self.is_full {
            let sent = messages.iter().flatten();
            let disclosure = Disclosure::of(Action::WatchDeadLetters, &self.recorded_filter, sent);
            let recorded = self
                .api
                .audit
                .record(&self.viewer, disclosure, self.api.clock.now());
            recorded.await.map_err(WatchEnd::Status)?;
        }
        for (letter, message) in letters.iter().zip(messages) {
            let id = &letter.id;
            self.progress.pass(&id.topic, id.partition, id.offset + 1);
            if let Some(message) = message {
                self.send(Event::DeadLetter(message), Some(reserved.clone()))
                    .await?;
            }
        }
        Ok(())
    }

    async fn send_heartbeat(&mut self) -> Result<(), WatchEnd> {
        let heartbeat = v1::Heartbeat {
            time: Some(to_timestamp(self.api.clock.now())),
            completeness: Some(self.completeness()),
        };
        self.send(Event::Heartbeat(heartbeat), None).await
    }

    /// Reserves memory for a batch, once the client has accepted all earlier messages. So a watcher that waits for
    /// memory holds none, and every other one releases its memory as its client accepts messages, or ends.
    async fn reserve(&mut self, bytes: u64) -> Result<Reservation, WatchEnd> {
        let buffer = self.buffer.clone();
        let all = while_accepting(self.accepted.clone(), buffer.acquire_many(BUFFER_KIB)).await?;
        drop(all.map_err(|_| WatchEnd::ClientGone)?);
        let (memory, caller) = (self.api.limits.memory.clone(), self.viewer.caller().clone());
        // With more, it could take all that becomes free until others give up.
        let reserving = memory.reserve(&caller, bytes.min(ANSWERS / 4));
        tokio::pin!(reserving);
        loop {
            match timeout(HEARTBEAT, &mut reserving).await {
                Ok(reserved) => return reserved.ok_or(WatchEnd::ClientGone),
                Err(_) => self.send_heartbeat().await?,
            }
        }
    }

    async fn send(&mut self, event: Event, reserved: Option<Reservation>) -> Result<(), WatchEnd> {
        let message = v1::WatchDeadLettersResponse {
            event: Some(event),
            resume_token: ResumeToken::encode(self.query, &self.progress),
        };
        let size = kib(message.encoded_len() as u64);
        let sending = async {
            // A message that exceeds the whole buffer is sent once the buffer is empty.
            let share = self.buffer.clone().acquire_many_owned(size.min(BUFFER_KIB)).await;
            let share = share.map_err(|_| WatchEnd::ClientGone)?;
            // Reserving two slots and using one keeps a slot free for the final status.
            let mut slots = self
                .sender
                .reserve_many(2)
                .await
                .map_err(|_| WatchEnd::ClientGone)?;
            if let Some(slot) = slots.next() {
                slot.send(Ok(Buffered {
                    message,
                    held: (share, reserved),
                }));
            }
            Ok(())
        };
        while_accepting(self.accepted.clone(), sending).await??;
        self.last_sent = Instant::now();
        Ok(())
    }
}

/// Waits for what depends on the client. The watch ends if the client accepts no message for [`SEND_TIMEOUT`]; a slow one may take
/// longer for all.
async fn while_accepting<T>(
    mut accepted: watch::Receiver<u64>,
    waiting: impl Future<Output = T>,
) -> Result<T, WatchEnd> {
    accepted.mark_unchanged();
    tokio::pin!(waiting);
    loop {
        tokio::select! {
            biased;
            done = &mut waiting => return Ok(done),
            changed = accepted.changed() => changed.map_err(|_| WatchEnd::ClientGone)?,
            () = tokio::time::sleep(SEND_TIMEOUT) => return Err(too_slow()),
        }
    }
}

fn too_slow() -> WatchEnd {
    let text = format!(
        "client accepted no message for {} s; resume with the last resume_token",
        SEND_TIMEOUT.as_secs()
    );
    WatchEnd::Status(status(Code::ResourceExhausted, text, "WATCHER_TOO_SLOW", []))
}

/// A new watch with the same token has the new scopes from its start.
fn scopes_changed() -> Status {
    let text = "the scopes of the caller have changed; resume with the last resume_token";
    status(Code::Unavailable, text, "SCOPES_CHANGED", [])
}

fn kib(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1024).max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use redeliver_proto::error::reason;

    use super::*;

    /// Time between two messages that a slow client accepts.
    const PACE: Duration = Duration::from_secs(29);

    #[tokio::test(start_paused = true)]
    async fn stalled_client_ends_the_watch() {
        let (accepting, accepted) = watch::channel(0_u64);
        let slow = async {
            for _ in 0..10 {
                tokio::time::sleep(PACE).await;
                accepting.send_modify(|count| *count += 1);
            }
        };
        let waiting = while_accepting(accepted.clone(), tokio::time::sleep(10 * PACE));
        let (waited, ()) = tokio::join!(waiting, slow);
        assert!(waited.is_ok());

        let waiting = while_accepting(accepted, std::future::pending::<()>());
        let Err(WatchEnd::Status(status)) = waiting.await else {
            panic!("the watch goes on");
        };
        assert_eq!(reason(&status).as_deref(), Some("WATCHER_TOO_SLOW"));
        drop(accepting);
    }
}
