//! Watching: what is there, then what comes.
//!
//! A watcher goes through the rows of the index in the order in which they came, so what it has seen is one
//! number, which is its resume token; the index itself is the buffer between a burst and a slow watcher. What
//! is on its way to a client is bounded in bytes. A client that takes nothing for [`PATIENCE`] is ended.

use std::sync::Arc;
use std::time::Duration;

use futures::stream;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::error::status;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_proto::{Message as _, v1};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tonic::{Code, Status};

use super::list::is_full;
use super::token::{Question, RESUME, question};
use super::{Answers, Api, ending, no_index, parse_filter};
use crate::filter::Expr;
use crate::index::{self, Part, Place};
use crate::metrics::Watching;

/// How often a silent stream says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// How long a client may take nothing.
const PATIENCE: Duration = Duration::from_secs(30);
/// What may be on its way to a client, in KiB.
const BUFFER_KIB: u32 = 4 << 10;
/// And in messages.
const BUFFER: usize = 1024;
/// How many dead letters are read from the index at once.
const READ: usize = 200;
/// Through how many rows one question goes at most, so that none takes long.
const STRETCH: i64 = 50_000;

/// A message with its place in the buffer, which is free again when the message is taken.
type Buffered = (v1::WatchDeadLettersResponse, OwnedSemaphorePermit);

/// Why a watch ends.
enum Ended {
    /// The client has gone.
    Gone,
    /// The client is told.
    DialectHeaders(Status),
}

struct Watcher {
    api: Api,
    filter: Expr,
    question: Question,
    is_full: bool,
    /// The last row that was looked at.
    behind: i64,
    sender: mpsc::Sender<Result<Buffered, Status>>,
    room: Arc<Semaphore>,
    _watching: Watching,
    _place: OwnedSemaphorePermit,
}

impl Api {
    pub(super) fn watch(
        &self,
        request: &v1::WatchDeadLettersRequest,
    ) -> Result<Answers<v1::WatchDeadLettersResponse>, Status> {
        let filter = parse_filter(&request.filter)?;
        let asked = question(&["watch", &request.filter]);
        let token = RESUME.read(self.generation, asked, &request.resume_token)?;
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            let text = "too many clients are watching; try again in a while";
            return Err(status(Code::ResourceExhausted, text, "TOO_MANY_WATCHERS", []));
        };
        let rows = self.shared.last_row.subscribe();
        let behind = match token {
            Some(token) => token.row,
            None if request.only_new => *rows.borrow(),
            None => 0,
        };
        // One more than messages, so that a last word always has room.
        let (sender, receiver) = mpsc::channel(BUFFER + 1);
        let watcher = Watcher {
            api: self.clone(),
            filter,
            question: asked,
            is_full: is_full(request.view),
            behind,
            sender,
            room: Arc::new(Semaphore::new(BUFFER_KIB as usize)),
            _watching: self.metrics.watching(),
            _place: place,
        };
        self.watchers.spawn(watcher.run(rows));
        let answers = stream::unfold(receiver, |mut receiver| async move {
            let next: Result<Buffered, Status> = receiver.recv().await?;
            Some((next.map(|(message, _room)| message), receiver))
        });
        Ok(Box::pin(answers))
    }
}

impl Watcher {
    async fn run(mut self, mut rows: watch::Receiver<i64>) {
        let stop = self.api.stop.clone();
        let gone = self.sender.clone();
        let ended = tokio::select! {
            result = self.watch(&mut rows) => match result {
                Err(ended) => ended,
                Ok(never) => match never {},
            },
            () = stop.cancelled() => Ended::DialectHeaders(ending()),
            () = gone.closed() => Ended::Gone,
        };
        if let Ended::DialectHeaders(status) = ended {
            // There is room for it; only a client that has gone does not hear it.
            let _ = gone.try_send(Err(status));
        }
    }

    async fn watch(&mut self, rows: &mut watch::Receiver<i64>) -> Result<std::convert::Infallible, Ended> {
        let there = *rows.borrow_and_update();
        self.send_up_to(there).await?;
        self.send(Event::Synced(v1::Synced {})).await?;
        let mut heartbeats = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = rows.changed() => {
                    if changed.is_err() {
                        return Err(Ended::DialectHeaders(ending()));
                    }
                    let there = *rows.borrow_and_update();
                    self.send_up_to(there).await?;
                }
                _ = heartbeats.tick() => {
                    let time = Some(to_timestamp(self.api.clock.now()));
                    self.send(Event::Heartbeat(v1::Heartbeat { time })).await?;
                }
            }
        }
    }

    /// Sends what matches up to a row.
    async fn send_up_to(&mut self, last: i64) -> Result<(), Ended> {
        while self.behind < last {
            let (filter, behind) = (self.filter.clone(), self.behind);
            let up_to = last.min(behind.saturating_add(STRETCH));
            let read = self
                .api
                .pool
                .read(move |connection| index::since(connection, &filter, behind, up_to, READ))
                .await;
            let Part { found, has_more } = read.map_err(|error| Ended::DialectHeaders(no_index(&error)))?;
            let shown = self
                .api
                .shown(&found, self.is_full)
                .await
                .map_err(Ended::DialectHeaders)?;
            for (found, shown) in found.iter().zip(shown) {
                self.behind = found.row;
                if let Some(shown) = shown {
                    self.send(Event::DeadLetter(shown)).await?;
                }
            }
            if !has_more {
                self.behind = up_to;
            }
        }
        Ok(())
    }

    async fn send(&self, event: Event) -> Result<(), Ended> {
        let place = Place {
            dead_at: 0,
            row: self.behind,
        };
        let message = v1::WatchDeadLettersResponse {
            event: Some(event),
            resume_token: RESUME.write(self.api.generation, self.question, place),
        };
        let size = u32::try_from(message.encoded_len().div_ceil(1024)).unwrap_or(u32::MAX);
        let sending = async {
            let room = self.room.clone().acquire_many_owned(size.min(BUFFER_KIB)).await;
            let room = room.map_err(|_| Ended::Gone)?;
            // All messages but the last word leave one place free.
            let mut places = self.sender.reserve_many(2).await.map_err(|_| Ended::Gone)?;
            if let Some(place) = places.next() {
                place.send(Ok((message, room)));
            }
            Ok(())
        };
        match timeout(PATIENCE, sending).await {
            Ok(sent) => sent,
            Err(_) => Err(Ended::DialectHeaders(status(
                Code::ResourceExhausted,
                format!(
                    "nothing was taken for {} s; go on with the last resume_token",
                    PATIENCE.as_secs()
                ),
                "WATCHER_TOO_SLOW",
                [],
            ))),
        }
    }
}
