//! Logs the Kafka clients of a process in, if `kafka.login` is set.
//!
//! `oidc` and `msk_iam` request tokens; [`redeliver_kafka::login`] decides when, and hands them to all clients.

#[cfg(feature = "msk-iam")]
mod msk_iam;
mod oidc;

use std::io;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::Timestamp;
use redeliver_kafka::{KafkaSettings, Login, LoginObserver, TokenError};
use redeliver_runtime::health::Part;
use redeliver_runtime::{Config, families};
use tokio_util::sync::CancellationToken;

use crate::kafka_settings::kafka_settings;
use oidc::Oidc;

/// Interval at which a waiting process updates the reason.
const ROUND: Duration = Duration::from_millis(500);
/// How long a command waits for an issuer that does not answer.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// Why Kafka clients cannot log in.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// There is no token.
    #[error("cannot get a token for Kafka: {0}")]
    Token(TokenError),
    /// The Kafka client of the program has no SASL mechanism for tokens.
    #[error("{}", redeliver_kafka::WITHOUT_TLS)]
    WithoutTls,
    /// The program cannot sign tokens for Amazon MSK.
    #[error("this program was built without the feature msk-iam; build it with --features msk-iam")]
    WithoutMskIam,
    /// The thread that requests tokens cannot be started.
    #[error("cannot start the thread that requests tokens for Kafka")]
    Thread(#[source] io::Error),
}

/// Starts to request tokens, if `kafka.login` is set. Does not wait for the first one.
pub(crate) fn start<O: LoginObserver>(
    config: &Config,
    observer: impl FnOnce() -> O,
) -> Result<Option<Login>, LoginError> {
    let Some(login) = &config.kafka.login else {
        return Ok(None);
    };
    check(config)?;
    #[cfg(feature = "msk-iam")]
    if let Some(msk_iam) = &login.msk_iam {
        let source = msk_iam::MskIam::new(msk_iam.clone(), config.kafka.brokers.clone());
        return Login::start(source, observer())
            .map(Some)
            .map_err(LoginError::Thread);
    }
    let Some(oidc) = &login.oidc else {
        return Ok(None);
    };
    Login::start(Oidc::new(oidc.clone()), observer())
        .map(Some)
        .map_err(LoginError::Thread)
}

/// Checks that this program can log in as configured.
pub(crate) fn check(config: &Config) -> Result<(), LoginError> {
    let Some(login) = &config.kafka.login else {
        return Ok(());
    };
    if cfg!(not(feature = "msk-iam")) && login.msk_iam.is_some() {
        return Err(LoginError::WithoutMskIam);
    }
    if cfg!(not(feature = "kafka-tls")) {
        return Err(LoginError::WithoutTls);
    }
    Ok(())
}

fn unavailable(problem: String) -> TokenError {
    TokenError {
        problem,
        is_refusal: false,
    }
}

fn refused(problem: String) -> TokenError {
    TokenError {
        problem,
        is_refusal: true,
    }
}

/// How a command connects to Kafka, from the configuration. Waits for the first token, if `kafka.login` is set. Blocks.
///
/// # Errors
/// If there is no token, because it is refused or the issuer does not answer.
pub fn kafka_of_command(config: &Config) -> Result<KafkaSettings, LoginError> {
    let login = start(config, || ())?;
    if let Some(login) = &login {
        login.wait(COMMAND_TIMEOUT).map_err(LoginError::Token)?;
    }
    Ok(KafkaSettings {
        login,
        ..kafka_settings(config)
    })
}

/// Waits for the first token until `shutdown` is cancelled. `part` shows why there is none yet.
pub(crate) async fn wait(login: &Login, shutdown: &CancellationToken, part: &Part) {
    part.not_ready("waiting for a token for Kafka");
    while !shutdown.is_cancelled() {
        let login = login.clone();
        let waited = tokio::task::spawn_blocking(move || login.wait(ROUND)).await;
        match waited {
            Ok(Ok(())) => return,
            Ok(Err(error)) => part.not_ready(format!("no token for Kafka: {error}")),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is shutting down.
            Err(_) => return,
        }
        tokio::select! {
            () = tokio::time::sleep(ROUND) => {}
            () = shutdown.cancelled() => {}
        }
    }
}

families! {
    /// Metrics of the login, registered only if clients log in by tokens. Cheap to clone.
    #[derive(Clone)]
    pub(crate) struct LoginMetrics {
        expiry: Gauge = "kafka_token_expiry_timestamp_seconds",
            "When the token with which Kafka clients log in expires; 0 before the first one";
        failures: Counter = "kafka_token_failures",
            "Failed requests for a token with which Kafka clients log in";
    }
}

impl LoginObserver for LoginMetrics {
    fn renewed(&self, expires: Timestamp) {
        self.expiry.set(expires.as_millis() / 1_000);
    }

    fn failed(&self) {
        self.failures.inc();
    }
}

#[cfg(all(test, not(any(feature = "kafka-tls", feature = "msk-iam"))))]
mod tests {
    use super::*;
    use crate::host::check_kafka;

    #[test]
    fn missing_features_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let keystore = directory.path().join("client.p12");
        std::fs::write(&keystore, "PKCS #12").unwrap();
        let keystore = format!("{{ ssl.keystore.location: {} }}", keystore.display());
        let oidc = "{ oidc: { token_url: \"https://issuer/token\", client_id: a, client_secret: b } }";
        for (kafka, field, feature) in [
            ("login: { msk_iam: {} }", "login", "msk-iam"),
            (&format!("login: {oidc}"), "login", "kafka-tls"),
            (
                &format!("properties: {keystore}"),
                "properties.ssl.keystore.location",
                "kafka-tls",
            ),
            (
                "properties: { security.protocol: SASL_SSL }",
                "properties.security.protocol",
                "kafka-tls",
            ),
            (
                "properties: { sasl.mechanism: SCRAM-SHA-512 }",
                "properties.sasl.mechanism",
                "kafka-tls",
            ),
            (
                "properties: { ssl.key.password: p }",
                "properties.ssl.key.password",
                "kafka-tls",
            ),
        ] {
            let config = Config::from_yaml(&format!("kafka: {{ {kafka} }}")).unwrap();
            let error = check_kafka(&config).unwrap_err().to_string();
            let expected = format!("kafka.{field}: this program was built without the feature {feature}");
            assert!(error.contains(&expected), "{error}");
        }
        let plain = "kafka: { properties: { security.protocol: SASL_PLAINTEXT, sasl.mechanism: PLAIN } }";
        assert!(check_kafka(&Config::from_yaml(plain).unwrap()).is_ok());
    }
}
