//! Supervised tasks and threads: each has a name, and the first failure shuts down the process gracefully.
//!
//! A panic is a failure. After the shutdown token is cancelled, by a signal or by a failure, [`Tasks`] waits for all
//! tasks until the grace period expires. The error names those that are still running. Background tasks, such as the
//! admin server, run until all other tasks have finished, so that a process can be observed while it shuts down.

use std::any::Any;
use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error_chain::error_chain;

/// Why a process did not shut down gracefully.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// A task or thread returned an error.
    #[error("{name} failed")]
    Failed {
        /// The name of the task or thread.
        name: String,
        /// The error it returned.
        source: BoxError,
    },
    /// A task or thread panicked.
    #[error("{name} panicked: {message}")]
    Panicked {
        /// The name of the task or thread.
        name: String,
        /// The message of the panic.
        message: String,
    },
    /// Tasks or threads did not finish within the grace period.
    #[error("still running after the grace period of {} s: {}", grace.as_secs_f64(), names.join(", "))]
    Stuck {
        /// The names of the tasks and threads.
        names: Vec<String>,
        /// The grace period.
        grace: Duration,
    },
}

/// Any error of a task.
pub type BoxError = Box<dyn Error + Send + Sync>;

type TaskResult = Result<(), BoxError>;

/// Capacity of the channel for threads that a [`Spawner`] has started.
const SPAWNER_CAPACITY: usize = 16;

/// The tasks and threads of a process.
#[derive(Debug)]
pub struct Tasks {
    shutdown: CancellationToken,
    foreground: Group,
    background: Group,
    spawner: Spawner,
    spawned: mpsc::Receiver<SpawnedThread>,
}

/// Starts threads after [`Tasks::run_until_shutdown`] was called. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Spawner(mpsc::Sender<SpawnedThread>);

struct SpawnedThread {
    name: String,
    result: Pin<Box<dyn Future<Output = TaskResult> + Send>>,
}

impl fmt::Debug for SpawnedThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpawnedThread")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Spawner {
    /// Like [`Tasks::spawn_thread`], for use within a running task. If [`Tasks::run_until_shutdown`] has returned, the
    /// thread is not supervised.
    ///
    /// # Errors
    /// When the operating system cannot start a thread.
    pub async fn spawn_thread<E: Into<BoxError>>(
        &self,
        name: impl Into<String>,
        work: impl FnOnce() -> Result<(), E> + Send + 'static,
    ) -> std::io::Result<()> {
        let name = name.into();
        let result = Box::pin(thread(&name, work)?);
        // The receiver is gone if `run_until_shutdown` has returned.
        let _ = self.0.send(SpawnedThread { name, result }).await;
        Ok(())
    }
}

impl Tasks {
    /// An empty set of tasks. A failure of any task cancels `shutdown`.
    #[must_use]
    pub fn new(shutdown: CancellationToken) -> Self {
        let (sender, spawned) = mpsc::channel(SPAWNER_CAPACITY);
        Self {
            shutdown,
            foreground: Group::default(),
            background: Group::default(),
            spawner: Spawner(sender),
            spawned,
        }
    }

    /// A handle that starts threads while the tasks run.
    #[must_use]
    pub fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    /// The token that requests shutdown.
    #[must_use]
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Starts a task. It may finish at any time, and must finish soon after the token is cancelled.
    pub fn spawn<E: Into<BoxError>>(
        &mut self,
        name: impl Into<String>,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.foreground
            .spawn(name.into(), async move { task.await.map_err(Into::into) });
    }

    /// Starts a task that is aborted when all other tasks have finished. Its failure is treated like that of any other
    /// task.
    pub fn spawn_background<E: Into<BoxError>>(
        &mut self,
        name: impl Into<String>,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.background
            .spawn(name.into(), async move { task.await.map_err(Into::into) });
    }

    /// Starts an OS thread for blocking work. It must check the token itself, and finish soon after it is cancelled.
    ///
    /// # Errors
    /// When the operating system cannot start a thread.
    pub fn spawn_thread<E: Into<BoxError>>(
        &mut self,
        name: impl Into<String>,
        work: impl FnOnce() -> Result<(), E> + Send + 'static,
    ) -> std::io::Result<()> {
        let name = name.into();
        let result = thread(&name, work)?;
        self.foreground.spawn(name, result);
        Ok(())
    }

    /// Runs until all tasks have finished. After the token is cancelled, waits for at most `grace`.
    ///
    /// # Errors
    /// The first failure, or else the names of tasks that are still running after the grace period.
    pub async fn run_until_shutdown(mut self, grace: Duration) -> Result<(), TaskError> {
        let mut failure = None;
        let mut deadline: Option<Instant> = None;
        loop {
            if self.foreground.is_empty() {
                break;
            }
            let grace_expired = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let result = tokio::select! {
                Some(result) = self.foreground.next() => result,
                Some(result) = self.background.next() => result,
                Some(thread) = self.spawned.recv() => {
                    self.foreground.spawn(thread.name, thread.result);
                    continue;
                }
                () = self.shutdown.cancelled(), if deadline.is_none() => {
                    deadline = Some(Instant::now() + grace);
                    continue;
                }
                () = grace_expired => {
                    let names = self.foreground.names();
                    tracing::error!(running = names.join(", "), "grace period expired");
                    failure.get_or_insert(TaskError::Stuck { names, grace });
                    break;
                }
            };
            if let Err(error) = result {
                tracing::error!(error = error_chain(&error), "task failed; shutting down");
                self.shutdown.cancel();
                failure.get_or_insert(error);
            }
        }
        // A thread may still run here and cannot be aborted, but its token is cancelled.
        self.shutdown.cancel();
        self.foreground.tasks.shutdown().await;
        self.background.tasks.shutdown().await;
        failure.map_or(Ok(()), Err)
    }
}

/// Starts a thread. The future resolves to its result.
fn thread<E: Into<BoxError>>(
    name: &str,
    work: impl FnOnce() -> Result<(), E> + Send + 'static,
) -> std::io::Result<impl Future<Output = TaskResult> + Send + 'static> {
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(work)).map(|result| result.map_err(Into::into));
        // The receiver is gone if `run_until_shutdown` has returned without waiting for this thread.
        let _ = sender.send(result.map_err(|panic| panic_message(&*panic)));
    })?;
    Ok(async move {
        match receiver.await {
            Ok(Ok(result)) => result,
            Ok(Err(message)) => Err(Panic(message).into()),
            Err(_) => Err(Panic("the thread ended without a result".to_owned()).into()),
        }
    })
}

#[derive(Debug, Default)]
struct Group {
    tasks: JoinSet<TaskResult>,
    names: HashMap<Id, String>,
}

impl Group {
    fn spawn(&mut self, name: String, task: impl Future<Output = TaskResult> + Send + 'static) {
        let id = self.tasks.spawn(task).id();
        self.names.insert(id, name);
    }

    fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.names.values().cloned().collect();
        names.sort_unstable();
        names
    }

    /// The result of the next task that finishes. `None` if there are no tasks. Cancel-safe.
    async fn next(&mut self) -> Option<Result<(), TaskError>> {
        let joined = self.tasks.join_next_with_id().await?;
        let id = joined.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let name = self.names.remove(&id).unwrap_or_default();
        Some(match joined {
            Ok((_, Ok(()))) => {
                tracing::debug!(task = name, "task finished");
                Ok(())
            }
            Ok((_, Err(error))) => Err(match error.downcast::<Panic>() {
                Ok(panic) => TaskError::Panicked {
                    name,
                    message: panic.0,
                },
                Err(source) => TaskError::Failed { name, source },
            }),
            Err(error) => {
                let message = match error.try_into_panic() {
                    Ok(panic) => panic_message(&*panic),
                    Err(error) => error.to_string(),
                };
                Err(TaskError::Panicked { name, message })
            }
        })
    }
}

/// The message of a panic. Distinguishes a thread that panicked from one that returned an error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Panic(String);

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    fn tasks() -> (Tasks, CancellationToken) {
        let token = CancellationToken::new();
        (Tasks::new(token.clone()), token)
    }

    async fn wait_for_shutdown(token: CancellationToken) -> io::Result<()> {
        token.cancelled().await;
        Ok(())
    }

    #[tokio::test]
    async fn failure_stops_the_others() {
        let (mut tasks, token) = tasks();
        tasks.spawn("good", wait_for_shutdown(token.clone()));
        tasks.spawn("bad", async { Err::<(), _>(io::Error::other("disk full")) });
        let error = tasks.run_until_shutdown(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "bad failed");
        assert_eq!(error.source().unwrap().to_string(), "disk full");
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn panic_is_a_failure() {
        let (mut tasks, token) = tasks();
        tasks.spawn("good", wait_for_shutdown(token.clone()));
        tasks.spawn("bad", async {
            if true {
                panic!("no way {}", 7)
            } else {
                Ok::<(), io::Error>(())
            }
        });
        let error = tasks.run_until_shutdown(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "bad panicked: no way 7");

        let (mut tasks, token) = self::tasks();
        tasks.spawn("good", wait_for_shutdown(token.clone()));
        tasks
            .spawn_thread("lane-0", || {
                if true {
                    panic!("lane down")
                } else {
                    Ok::<(), io::Error>(())
                }
            })
            .unwrap();
        let error = tasks.run_until_shutdown(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "lane-0 panicked: lane down");
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn late_thread_is_supervised() {
        let (mut tasks, token) = tasks();
        let spawner = tasks.spawner();
        let shutdown = token.clone();
        tasks.spawn("watch", async move {
            spawner.spawn_thread("late-0", || Ok::<(), io::Error>(())).await?;
            spawner
                .spawn_thread("late-1", || Err::<(), _>(io::Error::other("no way")))
                .await?;
            wait_for_shutdown(shutdown).await
        });
        let error = tasks.run_until_shutdown(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "late-1 failed");
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn tasks_may_finish_without_a_shutdown() {
        let (mut tasks, token) = tasks();
        tasks.spawn("one", async { Ok::<(), io::Error>(()) });
        tasks.spawn_thread("two", || Ok::<(), io::Error>(())).unwrap();
        tasks.run_until_shutdown(GRACE).await.unwrap();
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn tasks_past_grace_are_named() {
        let (mut tasks, token) = tasks();
        tasks.spawn("good", wait_for_shutdown(token.clone()));
        tasks.spawn("stuck", std::future::pending::<io::Result<()>>());
        tasks.spawn("also-stuck", std::future::pending::<io::Result<()>>());
        token.cancel();
        let error = tasks
            .run_until_shutdown(Duration::from_millis(50))
            .await
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "still running after the grace period of 0.05 s: also-stuck, stuck"
        );
    }

    #[tokio::test]
    async fn an_error_during_shutdown_is_returned() {
        let (mut tasks, token) = tasks();
        let shutdown = token.clone();
        tasks.spawn("flush", async move {
            shutdown.cancelled().await;
            Err::<(), _>(io::Error::other("not flushed"))
        });
        token.cancel();
        assert_eq!(
            tasks.run_until_shutdown(GRACE).await.unwrap_err().to_string(),
            "flush failed"
        );
    }

    #[tokio::test]
    async fn a_background_task_outlives_the_others() {
        let (mut tasks, token) = tasks();
        let (shutdown, alive) = (token.clone(), Arc::new(AtomicBool::new(false)));
        let (sender, receiver) = oneshot::channel::<()>();
        let background_alive = alive.clone();
        tasks.spawn("slow", async move {
            shutdown.cancelled().await;
            // Only a background task that still runs can set `alive`.
            sender.send(()).unwrap();
            while !alive.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            Ok::<(), io::Error>(())
        });
        tasks.spawn_background("admin", async move {
            receiver.await.unwrap();
            background_alive.store(true, Ordering::SeqCst);
            std::future::pending::<io::Result<()>>().await
        });
        token.cancel();
        tasks.run_until_shutdown(GRACE).await.unwrap();
    }
}
