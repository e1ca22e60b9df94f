//! `WatchDeadLetters`: streams existing dead letters, then new ones as they are indexed.
//!
//! A watcher reads the rows of the index in order, so that a single row number is its resume token, and the index itself
//! buffers bursts for slow clients. The number of bytes sent ahead of a client is bounded. A watch ends if its client
//! accepts no message for [`SEND_TIMEOUT`], or when the client may no longer read dead letters.

use std::sync::Arc;
use std::time::Duration;

use futures::stream;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::error::status;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_proto::{Message as _, v1};
use redeliver_service::identity::{self, Access};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tonic::{Code, Status};

use super::list::is_full;
use super::token::{QueryHash, RESUME, query_hash};
use super::{Api, ResponseStream, WATCHERS, parse_filter, query_failed, shutting_down};
use crate::filter::Expr;
use crate::index::{self, Cursor, Generation, Page};
use crate::metrics::WatcherGuard;

/// Interval of heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// A watch ends if its client accepts no message for this long.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of the messages that the client has not accepted yet, in KiB.
const BUFFER_KIB: u32 = 4 << 10;
/// Maximum number of these messages.
const BUFFER_MESSAGES: usize = 1024;
/// Number of dead letters that are read from the index at once.
const READ_BATCH: usize = 200;
/// Maximum number of rows that one query scans, so that a filter that matches few rows does not exceed the query timeout.
const SCANNED_ROWS: i64 = 50_000;

/// A message and its share of the buffer, which is released once the client accepts the message.
type Buffered = (v1::WatchDeadLettersResponse, OwnedSemaphorePermit);

/// Why a watch ends.
enum WatchEnd {
    ClientGone,
    /// The client receives this status.
    Status(Status),
}

struct Watcher {
    api: Api,
    /// The build of the index that the row numbers belong to.
    generation: Generation,
    filter: Expr,
    query: QueryHash,
    is_full: bool,
    /// The last row that was read.
    last_read: i64,
    sender: mpsc::Sender<Result<Buffered, Status>>,
    buffer: Arc<Semaphore>,
    _count: WatcherGuard,
    _permit: OwnedSemaphorePermit,
}

impl Api {
    pub(super) fn watch(
        &self,
        request: &v1::WatchDeadLettersRequest,
        access: Access,
    ) -> Result<ResponseStream<v1::WatchDeadLettersResponse>, Status> {
        let filter = parse_filter(&request.filter)?;
        let query = query_hash(&["watch", &request.filter]);
        self.check_states(&filter, &self.completeness())?;
        let generation = self.pool.generation();
        let token = RESUME.decode(generation, query, &request.resume_token)?;
        let Ok(permit) = self.watcher_permits.clone().try_acquire_owned() else {
            let text = format!("too many watchers; the limit is {WATCHERS}; retry later");
            return Err(status(Code::ResourceExhausted, text, "TOO_MANY_WATCHERS", []));
        };
        let rows = self.shared.last_row.subscribe();
        let last_read = match token {
            Some(token) => token.row,
            None if request.only_new => *rows.borrow(),
            None => 0,
        };
        // One slot is reserved for the final status, so that sending it never blocks.
        let (sender, receiver) = mpsc::channel(BUFFER_MESSAGES + 1);
        let watcher = Watcher {
            api: self.clone(),
            generation,
            filter,
            query,
            is_full: is_full(request.view),
            last_read,
            sender,
            buffer: Arc::new(Semaphore::new(BUFFER_KIB as usize)),
            _count: self.metrics.count_watcher(),
            _permit: permit,
        };
        self.watchers.spawn(watcher.run(rows, access));
        let messages = stream::unfold(receiver, |mut receiver| async move {
            let next: Result<Buffered, Status> = receiver.recv().await?;
            Some((next.map(|(message, _share)| message), receiver))
        });
        Ok(Box::pin(messages))
    }
}

impl Watcher {
    async fn run(mut self, mut rows: watch::Receiver<i64>, access: Access) {
        let stop = self.api.stop.clone();
        let sender = self.sender.clone();
        let end = tokio::select! {
            result = self.watch(&mut rows) => match result {
                Err(end) => end,
                Ok(never) => match never {},
            },
            () = stop.cancelled() => WatchEnd::Status(shutting_down()),
            refusal = access.withdrawn() => WatchEnd::Status(identity::grpc::status(&refusal)),
            () = sender.closed() => WatchEnd::ClientGone,
        };
        if let WatchEnd::Status(status) = end {
            // The reserved slot is free, so that this fails only if the client has gone.
            let _ = sender.try_send(Err(status));
        }
    }

    async fn watch(&mut self, rows: &mut watch::Receiver<i64>) -> Result<std::convert::Infallible, WatchEnd> {
        let last = *rows.borrow_and_update();
        self.send_up_to(last).await?;
        let completeness = Some(self.completeness());
        self.send(Event::Synced(v1::Synced { completeness })).await?;
        let mut heartbeats = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = rows.changed() => {
                    if changed.is_err() {
                        return Err(WatchEnd::Status(shutting_down()));
                    }
                    let last = *rows.borrow_and_update();
                    self.send_up_to(last).await?;
                }
                _ = heartbeats.tick() => self.send_heartbeat().await?,
            }
        }
    }

    async fn send_heartbeat(&self) -> Result<(), WatchEnd> {
        let heartbeat = v1::Heartbeat {
            time: Some(to_timestamp(self.api.clock.now())),
            completeness: Some(self.completeness()),
        };
        self.send(Event::Heartbeat(heartbeat)).await
    }

    fn completeness(&self) -> v1::Completeness {
        self.api.completeness().to_message(self.api.clock.now())
    }

    /// Row numbers start over when the index is rebuilt.
    fn check_generation(&self) -> Result<(), WatchEnd> {
        if self.api.pool.generation() == self.generation {
            return Ok(());
        }
        Err(WatchEnd::Status(RESUME.expired()))
    }

    /// Sends the dead letters that match, up to a row.
    async fn send_up_to(&mut self, last: i64) -> Result<(), WatchEnd> {
        self.check_generation()?;
        while self.last_read < last {
            let (filter, after) = (self.filter.clone(), self.last_read);
            let up_to = last.min(after.saturating_add(SCANNED_ROWS));
            let page = self
                .api
                .pool
                .read(move |connection| index::list_by_row(connection, &filter, after, up_to, READ_BATCH))
                .await;
            let Page { letters, has_more } = page.map_err(|error| WatchEnd::Status(query_failed(&error)))?;
            self.check_generation()?;
            let are_states_known = self.api.completeness().are_states_known();
            let messages = self
                .api
                .to_messages(&letters, self.is_full, are_states_known)
                .await
                .map_err(WatchEnd::Status)?;
            for (letter, message) in letters.iter().zip(messages) {
                self.last_read = letter.row;
                if let Some(message) = message {
                    self.send(Event::DeadLetter(message)).await?;
                }
            }
            if !has_more {
                // Rows that do not match are skipped by later queries and resume tokens.
                self.last_read = up_to;
            }
            // A client gives up without messages for a while, and would start again before the rows that were read in vain.
            if letters.is_empty() && self.last_read < last {
                self.send_heartbeat().await?;
            }
        }
        Ok(())
    }

    async fn send(&self, event: Event) -> Result<(), WatchEnd> {
        // A watch is ordered by row alone.
        let cursor = Cursor {
            dead_at: 0,
            row: self.last_read,
        };
        let message = v1::WatchDeadLettersResponse {
            event: Some(event),
            resume_token: RESUME.encode(self.generation, self.query, cursor),
        };
        let size = u32::try_from(message.encoded_len().div_ceil(1024)).unwrap_or(u32::MAX);
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
                slot.send(Ok((message, share)));
            }
            Ok(())
        };
        match timeout(SEND_TIMEOUT, sending).await {
            Ok(result) => result,
            Err(_) => Err(WatchEnd::Status(status(
                Code::ResourceExhausted,
                format!(
                    "client accepted no message for {} s; resume with the last resume_token",
                    SEND_TIMEOUT.as_secs()
                ),
                "WATCHER_TOO_SLOW",
                [],
            ))),
        }
    }
}
