//! Which jobs are accepted while the index has little or no room for more.
//!
//! What is due within the window needs no index. The rest of the memory above the high-water mark is for jobs that are
//! gone again within a minute. Anything later is refused: only the index could hold it until it is due.

use std::time::Duration;

use redeliver_core::{ErrorClass, Failure, Timestamp};

use crate::index::Room;

/// The code of a dead letter, and of an outcome.
pub(crate) const INDEX_FULL: &str = "scheduler.index-full";
/// When whoever was refused may ask again.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(30);
/// What is due so soon is accepted as long as there is any memory.
const SOON: Duration = Duration::from_secs(60);

/// Whether a job that is due then may be accepted.
pub(crate) fn check(room: Room, due: Timestamp, now: Timestamp, window: Duration) -> Result<(), Failure> {
    let ahead = match room {
        Room::Enough => return Ok(()),
        Room::Scarce => window.max(SOON),
        Room::None => window,
    };
    if due <= now.after(ahead) {
        return Ok(());
    }
    let reason = match room {
        Room::None => "is full",
        Room::Enough | Room::Scarce => "is nearly full",
    };
    let message = format!(
        "the memory of the scheduler's index {reason}: jobs that are due in more than {} s are not accepted until there is \
         room again",
        ahead.as_secs_f64()
    );
    Err(Failure {
        retry_after: Some(RETRY_AFTER),
        ..Failure::new(ErrorClass::Permanent, INDEX_FULL, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_less_room_there_is_the_sooner_jobs_must_be_due() {
        let now = Timestamp::from_millis(0);
        let is_accepted = |room, seconds, window| {
            let due = now.after(Duration::from_secs(seconds));
            check(room, due, now, Duration::from_secs(window)).is_ok()
        };
        assert!(is_accepted(Room::Enough, 1_000_000, 10));
        assert!(is_accepted(Room::Scarce, 60, 10) && !is_accepted(Room::Scarce, 61, 10));
        assert!(is_accepted(Room::Scarce, 600, 600));
        assert!(is_accepted(Room::None, 10, 10) && !is_accepted(Room::None, 11, 10));
    }
}
