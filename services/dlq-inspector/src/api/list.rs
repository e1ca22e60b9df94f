//! `ListDeadLetters` and `GetDeadLetter`.

use redeliver_proto::error::invalid;
use redeliver_proto::{Message as _, v1};
use tonic::Status;

use super::token::{PAGE, query_hash};
use super::{Api, convert, not_found, parse_filter, query_failed};
use crate::index::{self, Direction, IndexedLetter, Page};

const DEFAULT_PAGE_SIZE: usize = 50;
const MAX_PAGE_SIZE: usize = 1000;
/// A page ends before it exceeds this many bytes, unless a single dead letter does, because gRPC clients reject messages over 4 MiB by default.
const PAGE_BYTES: usize = 3 << 20;
/// Number of values that are read from Kafka at once.
const LOOKUP_BATCH: usize = 32;

impl Api {
    pub(super) async fn list(
        &self,
        request: v1::ListDeadLettersRequest,
    ) -> Result<v1::ListDeadLettersResponse, Status> {
        let filter = parse_filter(&request.filter)?;
        let direction = direction(&request.order_by)?;
        let size = page_size(request.page_size)?;
        let order = if direction == Direction::Ascending {
            "ascending"
        } else {
            ""
        };
        let query = query_hash(&["list", &request.filter, order]);
        let generation = self.pool.generation();
        let after = PAGE.decode(generation, query, &request.page_token)?;
        let completeness = self.completeness();
        self.check_states(&filter, &completeness)?;
        let are_states_known = completeness.are_states_known();
        let is_full = is_full(request.view);
        let Page {
            letters,
            mut has_more,
        } = self
            .pool
            .read(move |connection| index::list(connection, &filter, direction, after, size))
            .await
            .map_err(|error| query_failed(&error))?;

        let mut page = Vec::new();
        let mut bytes = 0;
        let mut last = None;
        'page: for batch in letters.chunks(LOOKUP_BATCH) {
            for (letter, message) in batch
                .iter()
                .zip(self.to_messages(batch, is_full, are_states_known).await?)
            {
                let size = message.as_ref().map_or(0, v1::DeadLetter::encoded_len);
                if bytes + size > PAGE_BYTES && !page.is_empty() {
                    has_more = true;
                    break 'page;
                }
                bytes += size;
                // The cursor also passes dead letters that are skipped because Kafka does not have them any more.
                last = Some(letter.cursor());
                page.extend(message);
            }
        }
        let token = last.filter(|_| has_more);
        let next_page_token = token.map_or_else(String::new, |cursor| PAGE.encode(generation, query, cursor));
        Ok(v1::ListDeadLettersResponse {
            dead_letters: page,
            next_page_token,
            completeness: Some(
                self.completeness_since(&completeness)
                    .to_message(self.clock.now()),
            ),
        })
    }

    pub(super) async fn get(&self, id: String) -> Result<v1::DeadLetter, Status> {
        let completeness = self.completeness();
        let letter = self.find(&id).await?;
        let record = self.record_of(&letter).await?.ok_or_else(|| not_found(&id))?;
        let completeness = self.completeness_since(&completeness);
        Ok(v1::DeadLetter {
            completeness: Some(completeness.to_message(self.clock.now())),
            ..convert::full(&letter, record, completeness.are_states_known())
        })
    }

    /// Converts dead letters to the requested view. In the FULL view, a dead letter that Kafka does not have any more is
    /// `None`.
    pub(super) async fn to_messages(
        &self,
        letters: &[IndexedLetter],
        is_full: bool,
        are_states_known: bool,
    ) -> Result<Vec<Option<v1::DeadLetter>>, Status> {
        if !is_full {
            return Ok(letters
                .iter()
                .map(|letter| Some(convert::basic(letter, are_states_known)))
                .collect());
        }
        let records = self.records_of(letters).await?;
        Ok(letters
            .iter()
            .zip(records)
            .map(|(letter, record)| Some(convert::full(letter, record?, are_states_known)))
            .collect())
    }
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

fn page_size(requested: i32) -> Result<usize, Status> {
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
