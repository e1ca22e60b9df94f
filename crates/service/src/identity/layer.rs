//! A `tower` layer that authenticates requests.

use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use redeliver_runtime::http_server::Protection;
use tonic::server::NamedService;
use tower::{Layer, Service};

use super::access::Permissions;
use super::{Access, Authenticator, Refusal};

/// Adds the [`Identity`](super::Identity) of the caller and its [`Access`] to the extensions of each request, which protects its
/// connection from being replaced from then on ([`Protection`]). Answers refused requests with `refuse`, and counts and logs them.
#[derive(Clone, Debug)]
pub struct AuthenticateLayer<R> {
    authenticator: Authenticator,
    required: Option<Permissions>,
    refuse: R,
}

impl<R> AuthenticateLayer<R> {
    /// `refuse` makes the response to a refused request.
    pub fn new(authenticator: Authenticator, refuse: R) -> Self {
        Self {
            authenticator,
            required: None,
            refuse,
        }
    }

    /// Also refuses calls that are not in the table, and callers that may not do what the table says with any application or
    /// topic. The operation itself requires the scope for the names that it is about.
    #[must_use]
    pub fn requiring(self, permissions: Permissions) -> Self {
        Self {
            required: Some(permissions),
            ..self
        }
    }
}

impl<S, R: Clone> Layer<S> for AuthenticateLayer<R> {
    type Service = Authenticate<S, R>;

    fn layer(&self, inner: S) -> Authenticate<S, R> {
        Authenticate {
            inner,
            layer: self.clone(),
        }
    }
}

/// The service of [`AuthenticateLayer`].
#[derive(Clone, Debug)]
pub struct Authenticate<S, R> {
    inner: S,
    layer: AuthenticateLayer<R>,
}

impl<S, R, B, A> Service<Request<B>> for Authenticate<S, R>
where
    S: Service<Request<B>, Response = Response<A>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    R: Fn(&Refusal) -> Response<A> + Clone + Send + Sync + 'static,
    B: Send + 'static,
    A: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let clone = self.inner.clone();
        // The original is the one that is ready.
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let AuthenticateLayer {
            authenticator,
            required,
            refuse,
        } = self.layer.clone();
        Box::pin(async move {
            let access = Access::of(&request, authenticator, required);
            match access.check().await {
                Ok(identity) => {
                    if let Some(protection) = request.extensions().get::<Protection>() {
                        protection.protect();
                    }
                    request.extensions_mut().insert(identity);
                    request.extensions_mut().insert(access);
                    inner.call(request).await
                }
                Err(refusal) => Ok(refuse(&refusal)),
            }
        })
    }
}

impl<S: NamedService, R> NamedService for Authenticate<S, R> {
    const NAME: &'static str = S::NAME;
}
