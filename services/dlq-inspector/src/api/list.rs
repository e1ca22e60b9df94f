//! `ListDeadLetters` and `GetDeadLetter`.

use redeliver_core::Record;
use redeliver_core::kept::is_editable;
use redeliver_kafka::lookup::StoredRecord;
use redeliver_proto::error::invalid;
use redeliver_proto::page::PAGE_BYTES;
use redeliver_proto::{Message as _, v1};
use redeliver_service::audit::Action;
use redeliver_service::memory_budget::Reservation;
use tonic::Status;

use super::origin::AtOrigin;
use super::token::{PageToken, query_hash};
use super::value::{self, RecordValue};
use super::{Api, convert, not_found};
use crate::access::Viewer;
use crate::audit::Disclosure;
use crate::decoding::MAX_JSON;
use crate::filter::NumberField;
use crate::index::{self, Direction, IndexedLetter, Page, PageLimit};

const DEFAULT_PAGE_SIZE: usize = 50;
const MAX_PAGE_SIZE: usize = 1000;
/// Maximum number of records that are read from Kafka at once.
const LOOKUP_BATCH: usize = 32;
/// Maximum size of these records in bytes, unless a single one is larger.
const LOOKUP_BYTES: u64 = 4 << 20;
/// A page ends after records of this size were read, in bytes: what is masked is read as a whole, and shown in a few bytes.
const READ_BYTES: u64 = 32 << 20;
/// Maximum size of the keys and headers that are read from the index at once, in bytes.
pub(super) const INDEX_BYTES: usize = 4 << 20;
/// The memory for these and the page, in bytes.
const OF_PAGE: u64 = INDEX_BYTES as u64 + PAGE_BYTES as u64;

impl Api {
    pub(super) async fn list(
        &self,
        viewer: &Viewer,
        request: v1::ListDeadLettersRequest,
    ) -> Result<(v1::ListDeadLettersResponse, Reservation), Status> {
        let filter = viewer.limit(self.parse_filter(&request.filter)?)?;
        let direction = direction(&request.order_by)?;
        let size = page_size(request.page_size)?;
        let order = if direction == Direction::Ascending {
            "ascending"
        } else {
            ""
        };
        let query = query_hash(&["list", &request.filter, order]);
        let after = PageToken::decode(query, &request.page_token)?;
        let completeness = self.completeness();
        let tests_states = filter.written().tests(NumberField::State);
        Self::check_states(tests_states, &completeness)?;
        let is_full = is_full(request.view);
        let limit = PageLimit {
            letters: size,
            bytes: INDEX_BYTES,
        };
        let Page {
            mut letters,
            mut has_more,
        } = self
            .pool
            .query(move |connection| {
                let filter = filter.resolve(connection)?;
                index::list(connection, &filter, direction, after, limit)
            })
            .await?;
        // The states were read by the query, which may have waited for its turn.
        let after_query = self.completeness_since(&completeness);
        Self::check_states(tests_states, &after_query)?;
        let are_states_known = after_query.are_states_known();

        let mut memory = None;
        if is_full {
            let first = letters.first().map_or(0, |letter| letter.record_size);
            if first > LOOKUP_BYTES {
                // It is alone on its page.
                has_more |= letters.len() > 1;
                letters.truncate(1);
            }
            // After the query, which can wait for its turn for long.
            memory = Some(self.reserve(viewer, OF_PAGE + first.max(LOOKUP_BYTES)).await?);
        }
        let (mut page, mut gone) = (Vec::new(), Vec::new());
        let (mut bytes, mut read) = (0, 0);
        let mut last = None;
        'page: for batch in batches(&letters, LOOKUP_BYTES) {
            let size = record_bytes(batch);
            if is_full && last.is_some() && (read >= READ_BYTES || size > LOOKUP_BYTES) {
                has_more = true;
                break;
            }
            read += size;
            let messages = self.to_messages(viewer, batch, is_full, are_states_known).await?;
            for (letter, message) in batch.iter().zip(messages) {
                let is_gone = message.is_none();
                let message = message.unwrap_or_else(|| convert::basic(viewer, letter, are_states_known));
                let size = message.encoded_len();
                if bytes + size > PAGE_BYTES && last.is_some() {
                    has_more = true;
                    break 'page;
                }
                bytes += size;
                last = Some(letter.cursor());
                if is_gone {
                    gone.push(message);
                } else {
                    page.push(message);
                }
            }
        }
        if is_full {
            let filter = self.recorded_filter(&request.filter)?;
            let disclosure = Disclosure::of(Action::ListDeadLetters, &filter, &page);
            self.audit.record(viewer, disclosure, self.clock.now()).await?;
        }
        let token = last.filter(|_| has_more);
        let next_page_token = token.map_or_else(String::new, |cursor| PageToken::encode(query, cursor));
        let completeness = self.completeness_since(&completeness);
        let answer = v1::ListDeadLettersResponse {
            dead_letters: page,
            gone,
            next_page_token,
            completeness: Some(self.completeness_message(&completeness, viewer)),
        };
        let memory = match memory {
            None => self.hold(viewer, &answer).await?,
            Some(memory) => {
                memory.shrink_to(answer.encoded_len() as u64);
                memory
            }
        };
        Ok((answer, memory))
    }

    pub(super) async fn get(
        &self,
        viewer: &Viewer,
        id: String,
    ) -> Result<(v1::DeadLetter, Reservation), Status> {
        let completeness = self.completeness();
        let letter = self.find(viewer, &id).await?;
        let decoded = self.schemas.as_ref().map_or(0, |_| MAX_JSON as u64);
        let mut memory = self.reserve(viewer, letter.record_size + decoded).await?;
        let mut stored = self.record_of(&letter).await?;
        let at_origin = match viewer.sees_payloads(&letter.id.topic) {
            true => self.at_origin(viewer, &letter, &stored.record).await?,
            false => None,
        };
        if let Some(whole) = at_origin.as_ref().and_then(AtOrigin::whole) {
            drop(memory);
            let size = letter.record_size + whole.size() as u64;
            memory = self.hold_bytes(viewer, size + decoded).await?;
            show_origin(&mut stored.record, whole);
        }
        let value = stored.record.value.clone();
        let completeness = self.completeness_since(&completeness);
        let letters = [&letter];
        let full = self.full(
            viewer,
            &letters,
            vec![Some(stored)],
            completeness.are_states_known(),
        );
        let Some(mut message) = full.await?.pop().flatten() else {
            return Err(not_found(&id));
        };
        if let Some(at_origin) = at_origin {
            message.set_payload_at_origin(at_origin.state());
            if !viewer.mask(&letter.id.topic).has_fields() {
                message.value_size = value.as_ref().map(|value| value.len() as u64);
            }
        }
        if let Some(bytes) = value {
            let topic = letter.id.topic.clone();
            self.decode(viewer, RecordValue { topic, bytes }, &mut message)
                .await?;
        }
        let disclosure = Disclosure::of(Action::GetDeadLetter, "", [&message]);
        self.audit.record(viewer, disclosure, self.clock.now()).await?;
        let is_redriven = message.state() == v1::DeadLetterState::Redriven;
        let answer = v1::DeadLetter {
            completeness: Some(self.completeness_message(&completeness, viewer)),
            redriven_as: is_redriven.then(|| self.redriven_as(viewer, &letter)).flatten(),
            ..message
        };
        memory.shrink_to(answer.encoded_len() as u64);
        Ok((answer, memory))
    }

    /// Converts dead letters to the requested view. In the FULL view, a dead letter that Kafka does not have any more is
    /// `None`.
    pub(super) async fn to_messages(
        &self,
        viewer: &Viewer,
        letters: &[IndexedLetter],
        is_full: bool,
        are_states_known: bool,
    ) -> Result<Vec<Option<v1::DeadLetter>>, Status> {
        if !is_full {
            return Ok(letters
                .iter()
                .map(|letter| Some(convert::basic(viewer, letter, are_states_known)))
                .collect());
        }
        let is_shown = |letter: &IndexedLetter| viewer.sees_payloads(&letter.id.topic);
        let with_payload: Vec<&IndexedLetter> = letters.iter().filter(|letter| is_shown(letter)).collect();
        let records = self.records_of(&with_payload).await?;
        let mut full = self
            .full(viewer, &with_payload, records, are_states_known)
            .await?
            .into_iter();
        let message = |letter| {
            if is_shown(letter) {
                full.next()?
            } else {
                Some(convert::basic(viewer, letter, are_states_known))
            }
        };
        Ok(letters.iter().map(message).collect())
    }

    /// Converts dead letters with these records to the FULL view; `None` for one whose record Kafka does not have any more.
    async fn full(
        &self,
        viewer: &Viewer,
        letters: &[&IndexedLetter],
        mut records: Vec<Option<StoredRecord>>,
        are_states_known: bool,
    ) -> Result<Vec<Option<v1::DeadLetter>>, Status> {
        let with_records = letters.iter().zip(&mut records);
        let values = with_records.map(|(letter, stored)| {
            Some(RecordValue {
                topic: letter.id.topic.clone(),
                bytes: stored.as_mut()?.record.value.take()?,
            })
        });
        let values = value::shown(viewer, values.collect()).await?;
        let letters = letters.iter().zip(records).zip(values);
        Ok(letters
            .map(|((letter, stored), value)| {
                Some(convert::full(viewer, letter, &stored?, value, are_states_known))
            })
            .collect())
    }
}

/// Adds what is at the origin of a dead letter, without headers that would be taken for its own.
fn show_origin(letter: &mut Record, whole: &Record) {
    (letter.key, letter.value) = (whole.key.clone(), whole.value.clone());
    letter.unreadable_headers += whole.unreadable_headers;
    for (name, value) in whole.headers.filtered(is_editable).iter() {
        letter.headers.push(name, value);
    }
}

/// Splits dead letters into batches whose records have at most this many bytes together, or that consist of one dead letter.
pub(super) fn batches(letters: &[IndexedLetter], bytes: u64) -> impl Iterator<Item = &[IndexedLetter]> {
    let mut rest = letters;
    std::iter::from_fn(move || {
        let mut size = 0_u64;
        let fits = rest.iter().take_while(|letter| {
            size = size.saturating_add(letter.record_size);
            size <= bytes
        });
        let count = fits.take(LOOKUP_BATCH).count().max(1);
        let (batch, after) = rest.split_at_checked(count)?;
        rest = after;
        Some(batch)
    })
}

/// The memory that the records of dead letters take, in bytes.
pub(super) fn record_bytes(letters: &[IndexedLetter]) -> u64 {
    let sizes = letters.iter().map(|letter| letter.record_size);
    sizes.fold(0, u64::saturating_add)
}

/// Whether the view is FULL. Any other value means BASIC.
pub(super) fn is_full(view: i32) -> bool {
    view == v1::DeadLetterView::Full as i32
}

fn direction(order_by: &str) -> Result<Direction, Status> {
    let words: Vec<&str> = order_by.split_whitespace().collect();
    match words[..] {
        [] | ["dead_at", "desc"] => Ok(Direction::Descending),
        ["dead_at"] | ["dead_at", "asc"] => Ok(Direction::Ascending),
        _ => Err(invalid(
            "order_by",
            "must be `dead_at desc` or `dead_at`",
            "ORDER_INVALID",
            [],
        )),
    }
}

pub(super) fn page_size(requested: i32) -> Result<usize, Status> {
    match usize::try_from(requested) {
        Ok(0) => Ok(DEFAULT_PAGE_SIZE),
        Ok(size) => Ok(size.min(MAX_PAGE_SIZE)),
        Err(_) => Err(invalid(
            "page_size",
            "must not be negative",
            "PAGE_SIZE_INVALID",
            [],
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_page_size_are_validated() {
        assert_eq!(direction("").unwrap(), Direction::Descending);
        assert_eq!(direction(" dead_at  desc ").unwrap(), Direction::Descending);
        assert_eq!(direction("dead_at").unwrap(), Direction::Ascending);
        assert!(direction("retry_count").is_err() && direction("dead_at desc, id").is_err());
        assert_eq!(page_size(0).unwrap(), 50);
        assert_eq!(page_size(7).unwrap(), 7);
        assert_eq!(page_size(5000).unwrap(), 1000);
        assert!(page_size(-1).is_err());
    }
}
