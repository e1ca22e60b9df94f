//! Supervised work: every task and thread has a name, and the first that fails ends the process in order.
//!
//! A panic is a failure. When the shutdown token is cancelled, by a signal or by a failure, all tasks are
//! waited for up to a grace period; those that have not ended by then are named in the error. Attendants,
//! such as the admin server, run until all the others have ended, so that a process can be watched while it
//! ends.

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

/// Why the work ended otherwise than in order.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// A task or thread returned an error.
    #[error("{name} failed")]
    Failed {
        /// Its name.
        name: String,
        /// Its error.
        source: BoxError,
    },
    /// A task or thread panicked.
    #[error("{name} panicked: {message}")]
    Panicked {
        /// Its name.
        name: String,
        /// The message of the panic.
        message: String,
    },
    /// Tasks or threads did not end within the grace period.
    #[error("still running after {} s of grace: {}", grace.as_secs_f64(), names.join(", "))]
    Stuck {
        /// Their names.
        names: Vec<String>,
        /// The grace period.
        grace: Duration,
    },
}

/// Any error of a task.
pub type BoxError = Box<dyn Error + Send + Sync>;

type Ending = Result<(), BoxError>;

/// How many threads may have been started that the supervisor has not taken note of.
const LATE: usize = 16;

/// The tasks and threads of a process.
#[derive(Debug)]
pub struct Tasks {
    shutdown: CancellationToken,
    workers: Group,
    attendants: Group,
    late: (mpsc::Sender<Late>, mpsc::Receiver<Late>),
}

/// Starts threads while the tasks run. A cheap handle.
#[derive(Clone, Debug)]
pub struct Spawner(mpsc::Sender<Late>);

/// A thread that was started while the tasks ran.
struct Late {
    name: String,
    ending: Pin<Box<dyn Future<Output = Ending> + Send>>,
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Spawner {
    /// As [`Tasks::spawn_thread`], for a task that runs already. When the process is ending, nobody waits for the
    /// thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub async fn spawn_thread<E: Into<BoxError>>(
        &self,
        name: impl Into<String>,
        work: impl FnOnce() -> Result<(), E> + Send + 'static,
    ) -> std::io::Result<()> {
        let name = name.into();
        let ending = Box::pin(thread(&name, work)?);
        // Nobody listens any more when the process is ending.
        let _ = self.0.send(Late { name, ending }).await;
        Ok(())
    }
}

impl Tasks {
    /// No tasks yet. The token is cancelled when one fails.
    #[must_use]
    pub fn new(shutdown: CancellationToken) -> Self {
        Self {
            shutdown,
            workers: Group::default(),
            attendants: Group::default(),
            late: mpsc::channel(LATE),
        }
    }

    /// A handle that starts threads while the tasks run.
    #[must_use]
    pub fn spawner(&self) -> Spawner {
        Spawner(self.late.0.clone())
    }

    /// The token that asks all to end.
    #[must_use]
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Starts a task. It may end by itself; it must end soon after the token is cancelled.
    pub fn spawn<E: Into<BoxError>>(
        &mut self,
        name: impl Into<String>,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.workers
            .spawn(name.into(), async move { task.await.map_err(Into::into) });
    }

    /// Starts a task that is stopped when all the others have ended. It may fail like any other.
    pub fn spawn_attendant<E: Into<BoxError>>(
        &mut self,
        name: impl Into<String>,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) {
        self.attendants
            .spawn(name.into(), async move { task.await.map_err(Into::into) });
    }

    /// Starts a thread of the operating system, for work that blocks. It must end soon after the token is
    /// cancelled, which it has to look at itself.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn spawn_thread<E: Into<BoxError>>(
        &mut self,
        name: impl Into<String>,
        work: impl FnOnce() -> Result<(), E> + Send + 'static,
    ) -> std::io::Result<()> {
        let name = name.into();
        let ending = thread(&name, work)?;
        self.workers.spawn(name, ending);
        Ok(())
    }

    /// Runs until all tasks have ended, or until the token is cancelled and then for at most `grace`.
    ///
    /// # Errors
    /// The first failure, or else the names of those that did not end in time.
    pub async fn run_until_shutdown(mut self, grace: Duration) -> Result<(), TaskError> {
        let mut failure = None;
        let mut deadline: Option<Instant> = None;
        loop {
            if self.workers.is_empty() {
                break;
            }
            let late = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let ended = tokio::select! {
                Some(ended) = self.workers.next() => ended,
                Some(ended) = self.attendants.next() => ended,
                Some(late) = self.late.1.recv() => {
                    self.workers.spawn(late.name, late.ending);
                    continue;
                }
                () = self.shutdown.cancelled(), if deadline.is_none() => {
                    deadline = Some(Instant::now() + grace);
                    continue;
                }
                () = late => {
                    let names = self.workers.names();
                    tracing::error!(running = names.join(", "), "the grace period is over");
                    failure.get_or_insert(TaskError::Stuck { names, grace });
                    break;
                }
            };
            if let Err(error) = ended {
                tracing::error!(error = error_chain(&error), "a task failed; shutting down");
                self.shutdown.cancel();
                failure.get_or_insert(error);
            }
        }
        self.shutdown.cancel();
        self.workers.tasks.shutdown().await;
        self.attendants.tasks.shutdown().await;
        failure.map_or(Ok(()), Err)
    }
}

/// Starts a thread. What is given back waits for its end.
fn thread<E: Into<BoxError>>(
    name: &str,
    work: impl FnOnce() -> Result<(), E> + Send + 'static,
) -> std::io::Result<impl Future<Output = Ending> + Send + 'static> {
    let (sender, ending) = oneshot::channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let ending = catch_unwind(AssertUnwindSafe(work)).map(|result| result.map_err(Into::into));
        // Nobody listens any more when the process is already ending without this thread.
        let _ = sender.send(ending.map_err(|panic| message(&*panic)));
    })?;
    Ok(async move {
        match ending.await {
            Ok(Ok(ending)) => ending,
            Ok(Err(message)) => Err(Panic(message).into()),
            Err(_) => Err(Panic("the thread is gone".to_owned()).into()),
        }
    })
}

/// Tasks with their names.
#[derive(Debug, Default)]
struct Group {
    tasks: JoinSet<Ending>,
    names: HashMap<Id, String>,
}

impl Group {
    fn spawn(&mut self, name: String, task: impl Future<Output = Ending> + Send + 'static) {
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

    /// The ending of the next task that ends; none when there is no task. Cancel safe.
    async fn next(&mut self) -> Option<Result<(), TaskError>> {
        let ended = self.tasks.join_next_with_id().await?;
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let name = self.names.remove(&id).unwrap_or_default();
        Some(match ended {
            Ok((_, Ok(()))) => {
                tracing::debug!(task = name, "ended");
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
                    Ok(panic) => message(&*panic),
                    Err(error) => error.to_string(),
                };
                Err(TaskError::Panicked { name, message })
            }
        })
    }
}

/// A panic of a thread on its way to the supervisor.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Panic(String);

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
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

    /// A task that ends when it is asked to.
    async fn obedient(token: CancellationToken) -> io::Result<()> {
        token.cancelled().await;
        Ok(())
    }

    #[tokio::test]
    async fn a_failure_ends_the_others_and_is_the_error() {
        let (mut tasks, token) = tasks();
        tasks.spawn("good", obedient(token.clone()));
        tasks.spawn("bad", async { Err::<(), _>(io::Error::other("disk full")) });
        let error = tasks.run_until_shutdown(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "bad failed");
        assert_eq!(error.source().unwrap().to_string(), "disk full");
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn a_panic_of_a_task_or_a_thread_is_a_failure() {
        let (mut tasks, token) = tasks();
        tasks.spawn("good", obedient(token.clone()));
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
        tasks.spawn("good", obedient(token.clone()));
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
    async fn a_thread_that_is_started_later_is_supervised_like_any_other() {
        let (mut tasks, token) = tasks();
        let spawner = tasks.spawner();
        let asked = token.clone();
        tasks.spawn("watch", async move {
            spawner.spawn_thread("late-0", || Ok::<(), io::Error>(())).await?;
            spawner
                .spawn_thread("late-1", || Err::<(), _>(io::Error::other("no way")))
                .await?;
            obedient(asked).await
        });
        let error = tasks.run_until_shutdown(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), "late-1 failed");
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn all_may_end_by_themselves() {
        let (mut tasks, token) = tasks();
        tasks.spawn("one", async { Ok::<(), io::Error>(()) });
        tasks.spawn_thread("two", || Ok::<(), io::Error>(())).unwrap();
        tasks.run_until_shutdown(GRACE).await.unwrap();
        assert!(token.is_cancelled());
    }

    #[tokio::test]
    async fn those_that_do_not_end_in_time_are_named() {
        let (mut tasks, token) = tasks();
        tasks.spawn("good", obedient(token.clone()));
        tasks.spawn("deaf", std::future::pending::<io::Result<()>>());
        tasks.spawn("also-deaf", std::future::pending::<io::Result<()>>());
        token.cancel();
        let error = tasks
            .run_until_shutdown(Duration::from_millis(50))
            .await
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "still running after 0.05 s of grace: also-deaf, deaf"
        );
    }

    #[tokio::test]
    async fn an_error_while_ending_is_still_reported() {
        let (mut tasks, token) = tasks();
        let asked = token.clone();
        tasks.spawn("flush", async move {
            asked.cancelled().await;
            Err::<(), _>(io::Error::other("not flushed"))
        });
        token.cancel();
        assert_eq!(
            tasks.run_until_shutdown(GRACE).await.unwrap_err().to_string(),
            "flush failed"
        );
    }

    #[tokio::test]
    async fn an_attendant_outlives_the_others() {
        let (mut tasks, token) = tasks();
        let (asked, watched) = (token.clone(), Arc::new(AtomicBool::new(false)));
        let (stop, seen) = (oneshot::channel::<()>(), watched.clone());
        tasks.spawn("slow", async move {
            asked.cancelled().await;
            // The attendant must still be there to set this.
            stop.0.send(()).unwrap();
            while !seen.load(Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            Ok::<(), io::Error>(())
        });
        tasks.spawn_attendant("admin", async move {
            stop.1.await.unwrap();
            watched.store(true, Ordering::SeqCst);
            std::future::pending::<io::Result<()>>().await
        });
        token.cancel();
        tasks.run_until_shutdown(GRACE).await.unwrap();
    }
}
