//! The worker.

use std::process::ExitCode;
use std::time::SystemTime;

use orders::Catalogue;
use redeliver_worker::{Attempt, Worker};

#[expect(
    clippy::disallowed_methods,
    reason = "a program outside of this workspace has no such rule"
)]
fn main() -> ExitCode {
    let catalogue = Catalogue::default();
    let confirm = move |attempt: Attempt| {
        let outcome = catalogue.confirm(&attempt, SystemTime::now());
        async move { outcome }
    };
    Worker::new("orders")
        .handle(confirm)
        .on_dead(|letter| {
            let id = letter.record.key.unwrap_or_default();
            eprintln!("order {} failed: {}", id.escape_ascii(), letter.failure.code);
        })
        .main()
}
