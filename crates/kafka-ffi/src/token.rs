//! Login tokens of clients (SASL/OAUTHBEARER).
//!
//! librdkafka asks for a token by an event. rdkafka serves it only where a client is polled, which admin clients never are, and
//! passes no extensions on. So tokens are not asked for, but set from outside: once when a client is created, and whenever there
//! is a new one. The event is left alone; it is a reminder, and nothing waits for it.

use std::ffi::{CString, c_char};
use std::fmt;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rdkafka::admin::AdminClient;
use rdkafka::bindings as rd;
use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{IsError as _, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, FutureProducer, Producer as _, ProducerContext, ThreadedProducer};

/// A token with which a client logs in. `Debug` does not show it.
pub struct Token {
    value: CString,
    principal: CString,
    /// Names and values, in turn.
    extensions: Vec<CString>,
    expires_at: i64,
}

/// Why a token cannot be used. Does not contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidToken {
    /// The token is empty or contains other characters than printable ASCII.
    #[error("the token is empty or contains other characters than printable ASCII")]
    Value,
    /// A name of a SASL extension is not valid.
    #[error("the name of a SASL extension must consist of the letters a-z and A-Z, and must not be `auth`")]
    ExtensionName,
    /// A value of a SASL extension is not valid.
    #[error("the value of a SASL extension must consist of printable ASCII characters")]
    ExtensionValue,
}

impl Token {
    /// A token that is valid until `expires_at`, in milliseconds since 1970. The principal appears only in the client's log.
    ///
    /// # Errors
    /// If the token or an extension has characters that the protocol does not allow (RFC 7628). librdkafka would repeat them in
    /// its error message, and thus in logs.
    pub fn new<'e>(
        value: &str,
        principal: &str,
        extensions: impl IntoIterator<Item = (&'e str, &'e str)>,
        expires_at: i64,
    ) -> Result<Self, InvalidToken> {
        let is_token = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic());
        let value = CString::new(value).ok().filter(|_| is_token);
        let mut flat = Vec::new();
        for (name, value) in extensions {
            if !is_extension_name(name) {
                return Err(InvalidToken::ExtensionName);
            }
            if !is_extension_value(value) {
                return Err(InvalidToken::ExtensionValue);
            }
            flat.push(CString::new(name).map_err(|_| InvalidToken::ExtensionName)?);
            flat.push(CString::new(value).map_err(|_| InvalidToken::ExtensionValue)?);
        }
        Ok(Self {
            value: value.ok_or(InvalidToken::Value)?,
            principal: CString::new(principal.replace('\0', "")).unwrap_or_default(),
            extensions: flat,
            expires_at,
        })
    }

    /// When it expires, in milliseconds since 1970.
    #[must_use]
    pub fn expires_at(&self) -> i64 {
        self.expires_at
    }
}

/// Whether a SASL extension may have this name.
#[must_use]
pub fn is_extension_name(name: &str) -> bool {
    !name.is_empty() && name != "auth" && name.bytes().all(|byte| byte.is_ascii_alphabetic())
}

/// Whether a SASL extension may have this value.
#[must_use]
pub fn is_extension_value(value: &str) -> bool {
    value.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("expires_at", &self.expires_at)
            .finish_non_exhaustive()
    }
}

mod sealed {
    use rdkafka::bindings as rd;

    pub trait Native {
        /// The client, which lives at least as long as `self`.
        fn native(&self) -> *mut rd::rd_kafka_t;
    }
}

use sealed::Native;

/// A client of the `rdkafka` crate.
pub trait RdClient: Native {}

impl<T: Native> RdClient for T {}

impl<C: ConsumerContext> Native for BaseConsumer<C> {
    fn native(&self) -> *mut rd::rd_kafka_t {
        self.client().native_ptr()
    }
}

impl<C: ProducerContext> Native for BaseProducer<C> {
    fn native(&self) -> *mut rd::rd_kafka_t {
        self.client().native_ptr()
    }
}

impl<C: ProducerContext + 'static> Native for ThreadedProducer<C> {
    fn native(&self) -> *mut rd::rd_kafka_t {
        self.client().native_ptr()
    }
}

impl Native for FutureProducer {
    fn native(&self) -> *mut rd::rd_kafka_t {
        self.client().native_ptr()
    }
}

impl<C: ClientContext> Native for AdminClient<C> {
    fn native(&self) -> *mut rd::rd_kafka_t {
        self.inner().native_ptr()
    }
}

impl<T: Native> Native for Arc<T> {
    fn native(&self) -> *mut rd::rd_kafka_t {
        T::native(self)
    }
}

/// A client that can be given another token at any time, from any thread; see [`KafkaClient::port`].
pub struct KafkaClient<T> {
    // Declared before the client, so that no token is set while the client is dropped.
    registration: Registration,
    client: T,
}

impl<T: RdClient> KafkaClient<T> {
    /// Wraps a client. There is no mutable access to it any more: it could be replaced while a token is set.
    pub fn new(client: T) -> Self {
        let native = Pointer(NonNull::new(client.native()));
        Self {
            registration: Registration(Arc::new(Mutex::new(native))),
            client,
        }
    }

    /// A handle by which the client is given tokens. It does not keep the client alive.
    pub fn port(&self) -> TokenPort {
        TokenPort(Arc::downgrade(&self.registration.0))
    }
}

impl<T> Deref for KafkaClient<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.client
    }
}

/// A client, or null once it is about to be dropped.
struct Pointer(Option<NonNull<rd::rd_kafka_t>>);

// SAFETY: the functions of librdkafka can be called from any thread.
unsafe impl Send for Pointer {}

fn lock(pointer: &Mutex<Pointer>) -> MutexGuard<'_, Pointer> {
    pointer.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Registration(Arc<Mutex<Pointer>>);

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.0).0 = None;
    }
}

/// Gives tokens to a client, as long as it exists.
#[derive(Clone)]
pub struct TokenPort(Weak<Mutex<Pointer>>);

impl fmt::Debug for TokenPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenPort")
    }
}

impl TokenPort {
    /// Whether the client may still exist.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Sets the token for the next logins. Connections that wait for one continue. Does nothing if the client does not exist
    /// any more. Does not block.
    ///
    /// # Errors
    /// If the token has expired, or the mechanism of the client is not `OAUTHBEARER`.
    pub fn set(&self, token: &Token) -> Result<(), RDKafkaErrorCode> {
        let Some(pointer) = self.0.upgrade() else {
            return Ok(());
        };
        // While this is locked, the client is not dropped.
        let pointer = lock(&pointer);
        let Some(client) = pointer.0 else {
            return Ok(());
        };
        let mut extensions: Vec<*const c_char> = token.extensions.iter().map(|text| text.as_ptr()).collect();
        let mut message = [c_char::default(); 256];
        // SAFETY: the client is live, because its owner resets the pointer before it drops the client. The strings live until the
        // call returns, which copies them, and the buffer has the given length.
        let error = unsafe {
            rd::rd_kafka_oauthbearer_set_token(
                client.as_ptr(),
                token.value.as_ptr(),
                token.expires_at,
                token.principal.as_ptr(),
                if extensions.is_empty() {
                    ptr::null_mut()
                } else {
                    extensions.as_mut_ptr()
                },
                extensions.len(),
                message.as_mut_ptr(),
                message.len(),
            )
        };
        if error.is_error() {
            return Err(error.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::ClientConfig;
    use rdkafka::client::DefaultClientContext;

    use super::*;

    const FAR: i64 = 4_000_000_000_000;

    fn admin(mechanism: &str) -> KafkaClient<AdminClient<DefaultClientContext>> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", "127.0.0.1:1")
            .set("security.protocol", "SASL_PLAINTEXT")
            .set("sasl.mechanism", mechanism)
            .set("sasl.username", "user")
            .set("sasl.password", "hunter2");
        KafkaClient::new(config.create().unwrap())
    }

    #[test]
    fn unpolled_client_takes_tokens() {
        let extensions = [("logicalCluster", "lkc-1"), ("identityPoolId", "pool-1")];
        let token = Token::new("a.b.c", "redeliver", extensions, FAR).unwrap();
        let client = admin("OAUTHBEARER");
        let port = client.port();
        assert_eq!(port.set(&token), Ok(()));
        let expired = Token::new("a.b.c", "redeliver", [], 1_000).unwrap();
        assert_eq!(port.set(&expired), Err(RDKafkaErrorCode::InvalidArgument));
        drop(client);
        assert!(!port.is_open());
        // It would be refused by the client.
        assert_eq!(port.set(&expired), Ok(()));
    }

    #[test]
    fn other_mechanism_refuses_tokens() {
        let token = Token::new("a.b.c", "redeliver", [], FAR).unwrap();
        assert_eq!(admin("PLAIN").port().set(&token), Err(RDKafkaErrorCode::State));
    }

    #[test]
    fn invalid_token_is_refused_and_hidden() {
        let of = |value: &str, name: &'static str, text: &'static str| {
            Token::new(value, "p", [(name, text)], FAR).map(|_| ())
        };
        assert_eq!(of("a.b", "name", "a value"), Ok(()));
        for value in ["", "a b", "a\0b", "a\nb", "ä"] {
            assert_eq!(of(value, "name", "value"), Err(InvalidToken::Value), "{value:?}");
        }
        for name in ["", "auth", "a1", "a-b"] {
            assert_eq!(of("t", name, "value"), Err(InvalidToken::ExtensionName), "{name}");
        }
        assert_eq!(of("t", "name", "a\u{1}b"), Err(InvalidToken::ExtensionValue));
        let token = Token::new("hunter2", "hunter2", [("name", "hunter2")], FAR).unwrap();
        assert!(!format!("{token:?}").contains("hunter2"));
    }
}
