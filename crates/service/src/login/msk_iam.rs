//! Signs tokens for IAM access control of Amazon MSK, with AWS credentials.
//!
//! A token is the presigned URL of a request that is never sent: `kafka-cluster:Connect`, signed as AWS requests are (Signature
//! Version 4), in base64. AWS publishes no format; this one is that of its own signers, with which the tests compare.
//!
//! The credentials come from AWS's SDK, and so from the same sources as in all programs that use it.

use std::error::Error;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::profile::ProfileFileCredentialsProvider;
use aws_config::provider_config::ProviderConfig;
use aws_config::sts::AssumeRoleProvider;
use aws_config::{BehaviorVersion, Region};
use aws_credential_types::Credentials;
use aws_credential_types::provider::ProvideCredentials as _;
use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_sts::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_sts::operation::assume_role::AssumeRoleError;
use aws_sdk_sts::operation::assume_role_with_web_identity::AssumeRoleWithWebIdentityError;
use aws_sigv4::http_request::{SignableBody, SignableRequest, SignatureLocation, SigningSettings, sign};
use aws_sigv4::sign::v4;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use aws_smithy_runtime_api::client::http::SharedHttpClient;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_kafka::{Token, TokenError, TokenSource};
use redeliver_runtime::config::MskIamConfig;
use tracing::subscriber::NoSubscriber;

use super::{refused, unavailable};

/// Maximum duration of getting credentials. Shorter than a command waits, so that the command can say why there is no token.
const TIMEOUT: Duration = Duration::from_secs(8);
/// Lifetime of a token. AWS permits no longer one.
const LIFETIME: Duration = Duration::from_secs(900);
const SECTION: &str = "kafka.login.msk_iam";

/// Signs tokens.
pub(super) struct MskIam {
    config: MskIamConfig,
    brokers: String,
}

impl MskIam {
    pub(super) fn new(config: MskIamConfig, brokers: String) -> Self {
        Self { config, brokers }
    }

    async fn token(&self) -> Result<Token, TokenError> {
        let client = aws_smithy_http_client::Builder::new()
            .tls_provider(Provider::Rustls(CryptoMode::Ring))
            .build_https();
        let region = self.region(&client).await?;
        let credentials = self.credentials(&client, &region).await?;
        let now = SystemClock.now();
        let expires = expiry(&credentials, now);
        if expires <= now {
            return Err(unavailable(format!(
                "{SECTION}: the AWS credentials have expired; their source must renew them"
            )));
        }
        let url = signed_url(credentials, region.as_ref(), now)
            .map_err(|problem| refused(format!("{SECTION}: cannot sign a token: {problem}")))?;
        let user_agent = concat!("&User-Agent=redeliver%2F", env!("CARGO_PKG_VERSION"));
        let value = URL_SAFE_NO_PAD.encode(url + user_agent);
        Token::new(&value, "msk-iam", [], expires.as_millis())
            .map_err(|error| refused(format!("{SECTION}: {error}")))
    }

    async fn region(&self, client: &SharedHttpClient) -> Result<Region, TokenError> {
        if let Some(region) = self.config.region(&self.brokers) {
            return Ok(Region::new(region.to_owned()));
        }
        let mut environment = aws_config::defaults(BehaviorVersion::v2026_01_12())
            .http_client(client.clone())
            .no_credentials();
        if let Some(profile) = &self.config.profile {
            environment = environment.profile_name(profile);
        }
        let environment = environment.load().await;
        environment.region().cloned().ok_or_else(|| {
            refused(format!(
                "{SECTION}.region: is missing; neither the names of the brokers nor AWS's environment contain it (AWS_REGION)"
            ))
        })
    }

    /// The credentials that sign. Nothing is kept between requests, so that new credentials are used at once.
    async fn credentials(
        &self,
        client: &SharedHttpClient,
        region: &Region,
    ) -> Result<Credentials, TokenError> {
        let provider = ProviderConfig::without_region()
            .with_http_client(client.clone())
            .with_region(Some(region.clone()));
        let credentials = match &self.config.profile {
            // A profile that was chosen takes precedence over the environment, which is first in the default chain.
            Some(profile) => {
                let of_profile = ProfileFileCredentialsProvider::builder()
                    .configure(&provider)
                    .profile_name(profile)
                    .build()
                    .provide_credentials()
                    .await;
                of_profile.map_err(|error| match error {
                    CredentialsError::CredentialsNotLoaded(_) => refused(format!(
                        "{SECTION}.profile: AWS's shared files contain no profile `{profile}` with credentials"
                    )),
                    error => problem(SECTION, &error),
                })?
            }
            None => {
                let chain = DefaultCredentialsChain::builder()
                    .configure(provider)
                    .region(region.clone());
                let of_chain = chain.build().await.provide_credentials().await;
                of_chain.map_err(|error| problem(SECTION, &error))?
            }
        };
        let Some(role) = &self.config.role_arn else {
            return Ok(credentials);
        };
        let sdk = aws_config::defaults(BehaviorVersion::v2026_01_12())
            .http_client(client.clone())
            .region(region.clone())
            .credentials_provider(credentials)
            .load()
            .await;
        let mut assume = AssumeRoleProvider::builder(role)
            .session_name(&self.config.role_session_name)
            .configure(&sdk);
        if let Some(id) = &self.config.external_id {
            assume = assume.external_id(id);
        }
        let assumed = assume.build().await.provide_credentials().await;
        assumed.map_err(|error| problem(&format!("{SECTION}.role_arn"), &error))
    }
}

impl TokenSource for MskIam {
    fn request(&mut self) -> Result<Token, TokenError> {
        let token = run_silently(TIMEOUT, self.token());
        let token = token.map_err(|error| unavailable(format!("cannot send requests: {error}")))?;
        token.unwrap_or_else(|| {
            Err(unavailable(format!(
                "{SECTION}: no source of AWS credentials has answered within {} s",
                TIMEOUT.as_secs()
            )))
        })
    }
}

/// Runs a future on a runtime of its own, for `timeout` at most: `None` if it takes longer. Nothing it does is logged: the SDK
/// logs secrets, some of them as warnings. Everything worth knowing is in its errors.
fn run_silently<T>(timeout: Duration, future: impl Future<Output = T>) -> io::Result<Option<T>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // The threads for blocking calls, which look up names and read files. Each keeps its subscriber until it ends.
        .on_thread_start(|| std::mem::forget(tracing::subscriber::set_default(NoSubscriber::new())))
        .build()?;
    let limited = async { tokio::time::timeout(timeout, future).await.ok() };
    let result = tracing::subscriber::with_default(NoSubscriber::new(), || runtime.block_on(limited));
    // Dropping it would wait for blocking calls, and a lookup of a name may take longer than the timeout.
    runtime.shutdown_background();
    Ok(result)
}

/// When a token that is signed now expires. It does not outlive the credentials that sign it.
fn expiry(credentials: &Credentials, now: Timestamp) -> Timestamp {
    // The signature contains whole seconds.
    let signed = Timestamp::from_millis(now.as_millis() / 1_000 * 1_000);
    let until = credentials.expiry().map(timestamp);
    until.map_or(signed.after(LIFETIME), |until| until.min(signed.after(LIFETIME)))
}

fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// The presigned URL of a request to connect to a cluster in this region.
fn signed_url(credentials: Credentials, region: &str, now: Timestamp) -> Result<String, String> {
    let mut settings = SigningSettings::default();
    settings.signature_location = SignatureLocation::QueryParams;
    settings.expires_in = Some(LIFETIME);
    let identity = credentials.into();
    let since = Duration::from_millis(u64::try_from(now.as_millis()).unwrap_or_default());
    let params = v4::SigningParams::builder()
        .identity(&identity)
        .region(region)
        .name("kafka-cluster")
        .time(UNIX_EPOCH + since)
        .settings(settings)
        .build()
        .map_err(|error| error.to_string())?;
    let url = format!("https://kafka.{region}.amazonaws.com/?Action=kafka-cluster%3AConnect");
    let request = SignableRequest::new("GET", &url, std::iter::empty(), SignableBody::Bytes(&[]));
    let request = request.map_err(|error| error.to_string())?;
    let (instructions, _signature) = sign(request, &params.into())
        .map_err(|error| error.to_string())?
        .into_parts();
    let mut request = http::Request::get(&url)
        .body(())
        .map_err(|error| error.to_string())?;
    instructions.apply_to_request_http1x(&mut request);
    Ok(request.uri().to_string())
}

/// Why there are no credentials. `setting` is what they are for.
fn problem(setting: &str, error: &CredentialsError) -> TokenError {
    let causes = || causes(error);
    if let Some(answer) = causes().find_map(StsAnswer::of) {
        return answer.problem(setting);
    }
    if let CredentialsError::CredentialsNotLoaded(_) = error
        && causes().all(|cause| cause.source().is_none())
    {
        return refused(format!(
            "{setting}: there are no AWS credentials; sources are the environment, the shared files, a web identity, a \
             container's endpoint and the metadata of an instance"
        ));
    }
    // The innermost cause: errors around it may contain the token of a container's endpoint.
    let cause = causes().last().map(|cause| {
        if cause.is::<http::header::InvalidHeaderValue>() {
            "the token for the container's endpoint contains a character that HTTP does not allow, such as a line break"
                .to_owned()
        } else if cause.is::<std::io::Error>() && cause.to_string().contains("No such file") {
            format!("{cause}: check AWS_WEB_IDENTITY_TOKEN_FILE and AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        } else {
            cause.to_string()
        }
    });
    let cause = bounded_text(&cause.unwrap_or_else(|| error.to_string()), 300);
    match error {
        CredentialsError::InvalidConfiguration(_) | CredentialsError::CredentialsNotLoaded(_) => refused(
            format!("{setting}: the AWS credentials are not configured correctly: {cause}"),
        ),
        _ => unavailable(format!("{setting}: cannot get AWS credentials: {cause}")),
    }
}

fn causes(error: &CredentialsError) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(error.source(), |error| (*error).source())
}

/// An error response of AWS's Security Token Service.
struct StsAnswer {
    status: u16,
    code: String,
    message: String,
}

impl StsAnswer {
    fn of(error: &(dyn Error + 'static)) -> Option<Self> {
        let of_role = error.downcast_ref::<SdkError<AssumeRoleError>>();
        let of_identity = error.downcast_ref::<SdkError<AssumeRoleWithWebIdentityError>>();
        of_role
            .and_then(Self::of_service)
            .or_else(|| of_identity.and_then(Self::of_service))
    }

    fn of_service<E: ProvideErrorMetadata>(error: &SdkError<E>) -> Option<Self> {
        let SdkError::ServiceError(context) = error else {
            return None;
        };
        Some(Self {
            status: context.raw().status().as_u16(),
            code: context.err().code().unwrap_or("no code").to_owned(),
            message: context.err().message().unwrap_or("no message").to_owned(),
        })
    }

    fn problem(&self, setting: &str) -> TokenError {
        let Self {
            status,
            code,
            message,
        } = self;
        let problem = format!(
            "{setting}: STS answered {status}: {} ({})",
            bounded_text(code, 100),
            bounded_text(message, 300)
        );
        if *status >= 500 || *status == 429 || code.starts_with("Throttl") {
            unavailable(problem)
        } else {
            refused(problem)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use serde::Deserialize;

    use super::*;

    /// A token of AWS's signer for Python; see tests/msk_iam/vectors.py.
    #[derive(Deserialize)]
    struct Vector {
        region: String,
        access_key_id: String,
        secret_access_key: String,
        session_token: Option<String>,
        signed_at: i64,
        token: String,
        expires_at_ms: i64,
    }

    impl Vector {
        fn credentials(&self) -> Credentials {
            Credentials::new(
                &self.access_key_id,
                &self.secret_access_key,
                self.session_token.clone(),
                None,
                "test",
            )
        }
    }

    fn vectors() -> Vec<Vector> {
        serde_json::from_str(include_str!("../../tests/msk_iam/vectors.json")).unwrap()
    }

    /// The part before the parameters, and the parameters in alphabetical order, without the name of the signer.
    fn parts(url: &str) -> (String, Vec<String>) {
        let (base, query) = url.split_once('?').unwrap();
        let parameters = query.split('&').map(str::to_owned);
        let mut parameters: Vec<String> = parameters
            .filter(|parameter| !parameter.starts_with("User-Agent="))
            .collect();
        parameters.sort_unstable();
        (base.to_owned(), parameters)
    }

    #[test]
    fn tokens_match_the_python_signer() {
        let vectors = vectors();
        assert_eq!(vectors.len(), 3);
        for vector in vectors {
            let theirs = URL_SAFE_NO_PAD.decode(&vector.token).unwrap();
            // The signature contains whole seconds only.
            let now = Timestamp::from_millis(vector.signed_at * 1_000 + 999);
            let ours = signed_url(vector.credentials(), &vector.region, now).unwrap();
            assert_eq!(parts(&ours), parts(&String::from_utf8(theirs).unwrap()));
            assert_eq!(
                expiry(&vector.credentials(), now).as_millis(),
                vector.expires_at_ms
            );
        }
    }

    #[test]
    fn blocking_call_times_out_silently() {
        let (end, ended) = mpsc::sync_channel::<()>(1);
        let (report, reports) = mpsc::sync_channel(2);
        // What other threads use; with `NoSubscriber`, nothing could be told apart.
        tracing::subscriber::set_global_default(Loud).unwrap();
        let blocking = async {
            let call = tokio::task::spawn_blocking(move || {
                let is_silent = tracing::dispatcher::get_default(tracing::Dispatch::is::<NoSubscriber>);
                report.send(is_silent).unwrap();
                // A defect fails the test instead of blocking it.
                let was_ended = ended.recv_timeout(Duration::from_secs(60)).is_ok();
                report.send(was_ended).unwrap();
            });
            call.await.unwrap();
        };
        assert!(
            run_silently(Duration::from_millis(50), blocking)
                .unwrap()
                .is_none()
        );
        end.send(()).expect("the call still runs");
        assert_eq!(reports.iter().collect::<Vec<_>>(), [true, true]);
        assert_eq!(run_silently(TIMEOUT, async { 1 }).unwrap(), Some(1));
    }

    /// A subscriber that sees everything.
    struct Loud;

    impl tracing::Subscriber for Loud {
        fn enabled(&self, _metadata: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

        fn event(&self, _event: &tracing::Event<'_>) {}

        fn enter(&self, _span: &tracing::span::Id) {}

        fn exit(&self, _span: &tracing::span::Id) {}
    }

    #[test]
    fn token_ends_with_the_credentials() {
        let now = Timestamp::from_millis(1_000_500);
        let of = |seconds| {
            let until = UNIX_EPOCH + Duration::from_secs(seconds);
            let credentials = Credentials::new("id", "secret", None, Some(until), "test");
            expiry(&credentials, now).as_millis()
        };
        assert_eq!(of(1_060), 1_060_000);
        assert_eq!(of(1_900), 1_900_000);
        assert_eq!(of(9_000), 1_900_000);
    }

    #[test]
    fn lasting_sts_errors_are_refusals() {
        let of = |status, code: &str| {
            StsAnswer {
                status,
                code: code.to_owned(),
                message: "details".to_owned(),
            }
            .problem("kafka.login.msk_iam.role_arn")
        };
        let denied = of(403, "AccessDenied");
        let expected = "kafka.login.msk_iam.role_arn: STS answered 403: AccessDenied (details)";
        assert_eq!(denied, refused(expected.to_owned()));
        assert!(of(400, "ExpiredTokenException").is_refusal);
        assert!(!of(400, "Throttling").is_refusal);
        assert!(!of(503, "ServiceUnavailable").is_refusal);
    }

    #[test]
    fn error_hides_the_container_token() {
        let invalid = http::HeaderValue::from_str("hunter2\n").unwrap_err();
        let error = CredentialsError::invalid_configuration(Leaky(invalid));
        let shown = problem(SECTION, &error);
        assert!(shown.is_refusal);
        assert!(shown.problem.contains("such as a line break"), "{shown}");
        assert!(!shown.problem.contains("hunter2"), "{shown}");
    }

    /// As the SDK's error, which is private.
    #[derive(Debug, thiserror::Error)]
    #[error("`hunter2` could not be used as a header value")]
    struct Leaky(#[source] http::header::InvalidHeaderValue);
}
