//! Handlers that process several records together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt as _;
use redeliver_core::{Failure, Outcome};
use tower::service_fn;

use crate::batcher::{BatchLimits, Batcher};
use crate::handler::{Attempt, Handler};

/// The error code of the records of a call that has another number of results.
const BATCH_RESULTS: &str = "handler.batch";

/// A handler that processes several attempts in one call of a function, which returns one result for each, in their order. Records keep
/// their own order, limits, retries and outcomes; a record that has failed before is alone in its call.
///
/// A call has at most as many records as attempts run at the same time (`pipelines.NAME.concurrency`). If a call panics, or has another number of results, all of
/// its attempts fail transiently.
///
/// ```rust,no_run
/// use std::time::Duration;
///
/// use redeliver_worker::{Attempt, BatchLimits, Failure, Worker, in_batches};
///
/// async fn store(attempts: Vec<Attempt>) -> Vec<Result<(), Failure>> {
///     // One statement for all of them.
///     vec![Ok(()); attempts.len()]
/// }
///
/// fn main() -> std::process::ExitCode {
///     let limits = BatchLimits { records: 100, bytes: 1_000_000, wait: Duration::from_millis(5), calls: 4 };
///     Worker::new("store").handle_with(in_batches(limits, store)).main()
/// }
/// ```
pub fn in_batches<F, Fut, R>(limits: BatchLimits, handler: F) -> impl Handler
where
    F: Fn(Vec<Attempt>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Vec<Result<R, Failure>>> + Send + 'static,
    R: Into<Outcome> + 'static,
{
    let calls = AtomicU64::new(0);
    let batcher = Batcher::new(limits, move |attempts: Vec<Attempt>| {
        let (count, call) = (attempts.len(), calls.fetch_add(1, Ordering::Relaxed));
        let results = handler(attempts);
        async move { outcomes(results.await, count, call) }.boxed()
    });
    let batcher = Arc::new(batcher);
    service_fn(move |attempt: Attempt| {
        let batcher = batcher.clone();
        async move { batcher.process_attempt(attempt).await }
    })
}

fn outcomes<R: Into<Outcome>>(
    results: Vec<Result<R, Failure>>,
    count: usize,
    call: u64,
) -> Vec<Result<Outcome, Failure>> {
    // For the circuit breaker, the failures of one call are one.
    let of_this_call = |failure| Failure {
        shared_call: Some(call),
        ..failure
    };
    if results.len() != count {
        let problem = format!("{} results for {count} records", results.len());
        return vec![Err(of_this_call(Failure::transient(BATCH_RESULTS, problem))); count];
    }
    let results = results.into_iter();
    results
        .map(|result| result.map(Into::into).map_err(of_this_call))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use futures::future::join_all;
    use redeliver_core::ErrorClass;

    use super::*;
    use crate::test_kit::{End, TestKit, TestRecord};

    const LIMITS: BatchLimits = BatchLimits {
        records: 3,
        bytes: 1_000,
        wait: Duration::from_secs(1),
        calls: 1,
    };

    fn kit() -> TestKit {
        TestKit::from_yaml("pipelines: { p: { output: o, retry: { tiers: [1s] } } }", "p").unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn failed_record_is_alone_next_time() {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let seen = calls.clone();
        let handler = in_batches(LIMITS, move |attempts: Vec<Attempt>| {
            let texts: Vec<String> = attempts
                .iter()
                .map(|one| one.text().unwrap().to_owned())
                .collect();
            seen.lock().unwrap().push(texts.clone());
            async move {
                let result = |text: String| match text.as_str() {
                    "b" => Err(Failure::permanent("b.bad", "")),
                    "c" => Err(Failure::transient("c.busy", "")),
                    _ => Ok(text + "!"),
                };
                texts.into_iter().map(result).collect()
            }
        });
        let kit = kit();
        let runs = ["a", "b", "c"].map(|text| kit.run_with(handler.clone(), TestRecord::value(text)));
        let [a, b, c] = &join_all(runs).await[..] else {
            panic!("not three")
        };
        assert!(matches!(&a.end, End::Succeeded(outputs) if outputs[0].value.as_deref() == Some(b"a!")));
        assert!(matches!(&b.end, End::Dead(letter) if letter.failure.code == "b.bad"));
        assert!(matches!(&c.end, End::Dead(letter) if letter.failure.class == ErrorClass::Exhausted));
        assert_eq!(*calls.lock().unwrap(), [&["a", "b", "c"][..], &["c"]]);
    }

    #[tokio::test(start_paused = true)]
    async fn wrong_number_of_results_fails_all() {
        let handler = in_batches(LIMITS, async |_| Vec::<Result<(), _>>::new());
        let run = kit().run_with(handler, TestRecord::value("a")).await;
        assert_eq!(run.attempts, 2);
        let End::Dead(letter) = &run.end else {
            panic!("{run:?}")
        };
        assert_eq!(
            letter.failure.message,
            "gave up after 2 attempts: 0 results for 1 records"
        );
    }
}
