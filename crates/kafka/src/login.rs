//! Logs all clients of a process in with a token that expires (SASL/OAUTHBEARER).
//!
//! One thread per process requests a token, and the next one when 80% of its lifetime have passed. While requests fail, it
//! tries again, and clients keep the token that they have. Every client of the process is registered when it is created
//! ([`ClientSettings`](crate::client::ClientSettings)), and gets each token at once, whether it is polled or not. So a
//! connection that the broker wants to be authenticated again always finds a fresh token.
//!
//! rdkafka's callback for tokens is not used: it needs a client that is polled, which admin clients are not, passes on no SASL
//! extensions, and logs rejected tokens.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_kafka_ffi::{Token, TokenPort};

/// Delays between failed requests.
const MIN_DELAY: Duration = Duration::from_millis(500);
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Why there is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct TokenError {
    /// What is wrong, with the setting to look at. Contains no secret.
    pub problem: String,
    /// Whether the same request will certainly fail again until a setting or a secret is changed.
    pub is_refusal: bool,
}

/// Where tokens come from.
pub trait TokenSource: Send + 'static {
    /// Requests a new token. Blocks, for a bounded time.
    ///
    /// # Errors
    /// If there is none; another request follows.
    fn request(&mut self) -> Result<Token, TokenError>;
}

/// Is told about tokens, for metrics. Called on the thread that requests them.
pub trait LoginObserver: Send + 'static {
    /// There is a new token, which expires at this time.
    fn renewed(&self, _expires: Timestamp) {}
    /// A request has failed.
    fn failed(&self) {}
}

/// No observer.
impl LoginObserver for () {}

/// The login of a process. Its thread ends when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct Login(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    /// Ends the thread when it is dropped.
    _stop: SyncSender<()>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified after every request.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    token: Option<Token>,
    /// Why the last request failed.
    error: Option<TokenError>,
    clients: Vec<TokenPort>,
}

impl State {
    fn has_valid_token(&self, now: Timestamp) -> bool {
        let token = self.token.as_ref();
        token.is_some_and(|token| token.expires_at() > now.as_millis())
    }
}

impl Login {
    /// Starts the thread, which requests the first token at once.
    ///
    /// # Errors
    /// If the operating system cannot create a thread.
    pub fn start(source: impl TokenSource, observer: impl LoginObserver) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = sync_channel::<()>(0);
        let keeper = Keeper {
            source,
            observer,
            shared: shared.clone(),
            backoff: Backoff::new(MIN_DELAY, MAX_DELAY),
            log_throttle: LogThrottle::default(),
        };
        thread::Builder::new()
            .name("kafka-login".to_owned())
            .spawn(move || {
                let mut keeper = keeper;
                let mut wait = keeper.request();
                while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                    wait = keeper.request();
                }
            })?;
        Ok(Self(Arc::new(Handle { shared, _stop: stop })))
    }

    /// Waits until there is a valid token. Blocks.
    ///
    /// # Errors
    /// Why there is none: at once if it is refused, otherwise after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<(), TokenError> {
        let deadline = Instant::now() + timeout;
        let mut state = self.0.shared.lock();
        loop {
            if state.has_valid_token(SystemClock.now()) {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match &state.error {
                Some(error) if error.is_refusal || left.is_zero() => return Err(error.clone()),
                None if left.is_zero() => {
                    return Err(TokenError {
                        problem: "no token was issued yet".to_owned(),
                        is_refusal: false,
                    });
                }
                _ => {}
            }
            let waited = self.0.shared.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives a client the current token now and all later ones.
    pub(crate) fn register(&self, client: TokenPort) {
        let mut state = self.0.shared.lock();
        if let Some(token) = &state.token
            && state.has_valid_token(SystemClock.now())
        {
            set(&client, token);
        }
        state.clients.retain(TokenPort::is_open);
        state.clients.push(client);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn set(client: &TokenPort, token: &Token) {
    if let Err(error) = client.set(token) {
        tracing::warn!(%error, "Kafka client rejected the token");
    }
}

/// The thread's part.
struct Keeper<S, O> {
    source: S,
    observer: O,
    shared: Arc<Shared>,
    backoff: Backoff,
    log_throttle: LogThrottle,
}

impl<S: TokenSource, O: LoginObserver> Keeper<S, O> {
    /// Requests a token and hands it to all clients. Returns the time until the next request.
    fn request(&mut self) -> Duration {
        let requested = self.source.request();
        let mut state = self.shared.lock();
        let wait = match requested {
            Ok(token) => {
                self.backoff.reset();
                self.log_throttle.reset();
                let (now, expires) = (SystemClock.now(), Timestamp::from_millis(token.expires_at()));
                state.clients.retain(TokenPort::is_open);
                for client in &state.clients {
                    set(client, &token);
                }
                state.token = Some(token);
                state.error = None;
                self.observer.renewed(expires);
                tracing::debug!(%expires, "new token for Kafka");
                renew_after(expires.since(now))
            }
            Err(error) => {
                self.observer.failed();
                if self.log_throttle.should_log() {
                    tracing::warn!(
                        error = error.problem,
                        has_valid_token = state.has_valid_token(SystemClock.now()),
                        "cannot get a token for Kafka; retrying"
                    );
                }
                state.error = Some(error);
                self.backoff.next_delay()
            }
        };
        drop(state);
        self.shared.changed.notify_all();
        wait
    }
}

/// The time after which a token with this remaining lifetime is replaced.
fn renew_after(lifetime: Duration) -> Duration {
    lifetime.mul_f64(0.8).max(MIN_DELAY)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    /// Returns what the test sends, and waits for it.
    struct Planned(Receiver<Result<Token, TokenError>>);

    impl TokenSource for Planned {
        fn request(&mut self) -> Result<Token, TokenError> {
            self.0
                .recv()
                .unwrap_or_else(|_| Err(error("the test has ended", false)))
        }
    }

    fn error(problem: &str, is_refusal: bool) -> TokenError {
        TokenError {
            problem: problem.to_owned(),
            is_refusal,
        }
    }

    fn token(lifetime: Duration) -> Token {
        let expires = SystemClock.now().after(lifetime);
        Token::new("a.b.c", "test", [], expires.as_millis()).unwrap()
    }

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn waiting_ends_with_first_token() {
        let (send, planned) = sync_channel(3);
        let login = Login::start(Planned(planned), ()).unwrap();
        assert_eq!(
            login.wait(Duration::ZERO),
            Err(error("no token was issued yet", false))
        );
        send.send(Err(error("the issuer is down", false))).unwrap();
        send.send(Ok(token(Duration::from_secs(3_600)))).unwrap();
        assert_eq!(login.wait(SOON), Ok(()));
    }

    #[test]
    fn refusal_ends_waiting() {
        let (send, planned) = sync_channel(1);
        let login = Login::start(Planned(planned), ()).unwrap();
        send.send(Err(error("wrong secret", true))).unwrap();
        assert_eq!(login.wait(SOON), Err(error("wrong secret", true)));
    }

    #[test]
    fn failed_renewal_keeps_valid_token() {
        let (send, planned) = sync_channel(0);
        let login = Login::start(Planned(planned), ()).unwrap();
        send.send(Ok(token(Duration::from_secs(3)))).unwrap();
        // Taken by the second request.
        send.send(Err(error("wrong secret", true))).unwrap();
        send.send(Ok(token(Duration::from_secs(3_600)))).unwrap();
        assert_eq!(login.wait(SOON), Ok(()));
    }

    #[test]
    fn token_is_replaced_before_expiry() {
        assert_eq!(
            renew_after(Duration::from_secs(3_600)),
            Duration::from_secs(2_880)
        );
        assert_eq!(renew_after(Duration::ZERO), MIN_DELAY);
    }
}
