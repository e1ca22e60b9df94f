//! An OpenTelemetry collector: receives spans over OTLP/gRPC and keeps them. It runs on a thread of its own,
//! so that synchronous tests can use it too, and goes away with the value.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::sync::oneshot;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::eventually::{ensure, eventually_async};

/// A running collector; see the module.
#[derive(Debug)]
pub struct OtlpReceiver {
    address: SocketAddr,
    spans: Spans,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

type Spans = Arc<Mutex<Vec<ReceivedSpan>>>;

/// A span with the attributes of the process that sent it.
#[derive(Clone, Debug)]
pub struct ReceivedSpan {
    /// The resource attributes of the process.
    pub resource: Vec<KeyValue>,
    /// The span.
    pub span: Span,
}

impl OtlpReceiver {
    /// Starts a collector on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// If no port can be bound or no thread started.
    pub fn start() -> Self {
        Self::try_start().unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn try_start() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("binding the collector")?;
        listener
            .set_nonblocking(true)
            .context("making the collector's socket non-blocking")?;
        let address = listener.local_addr().context("reading the collector's address")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the collector's runtime")?;
        let spans = Spans::default();
        let service = TraceServiceServer::new(Collector(spans.clone()));
        let (shutdown, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("otlp-receiver".into())
            .spawn(move || {
                runtime.block_on(async {
                    let serve = async {
                        let listener = tokio::net::TcpListener::from_std(listener)?;
                        tonic::transport::Server::builder()
                            .add_service(service)
                            .serve_with_incoming(TcpIncoming::from(listener))
                            .await?;
                        anyhow::Ok(())
                    };
                    tokio::select! {
                        ended = serve => ended.unwrap_or_else(|error| panic!("serving as a collector: {error:#}")),
                        _ = stopped => {}
                    }
                });
            })
            .context("starting the collector's thread")?;
        Ok(Self {
            address,
            spans,
            shutdown: Some(shutdown),
            thread: Some(thread),
        })
    }

    /// Where to send spans to.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What has been received so far.
    pub fn spans(&self) -> Vec<ReceivedSpan> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until `count` spans have been received.
    ///
    /// # Panics
    /// If they have not come within ten seconds.
    pub async fn wait_for(&self, count: usize) -> Vec<ReceivedSpan> {
        let what = format!("{count} spans are received");
        eventually_async(&what, Duration::from_secs(10), async || {
            let spans = self.spans();
            ensure(spans.len() >= count, format!("{spans:#?}")).map(|()| spans)
        })
        .await
    }
}

impl Drop for OtlpReceiver {
    fn drop(&mut self) {
        drop(self.shutdown.take());
        if let Some(thread) = self.thread.take() {
            // A panic in there has been printed, and its test misses spans.
            drop(thread.join());
        }
    }
}

impl ReceivedSpan {
    /// A text attribute of the process.
    pub fn resource(&self, key: &str) -> Option<&str> {
        match value(&self.resource, key)? {
            Value::StringValue(text) => Some(text),
            _ => None,
        }
    }

    /// A text attribute of the span.
    pub fn attribute(&self, key: &str) -> Option<&str> {
        match value(&self.span.attributes, key)? {
            Value::StringValue(text) => Some(text),
            _ => None,
        }
    }

    /// A whole number among the attributes of the span.
    pub fn number(&self, key: &str) -> Option<i64> {
        match value(&self.span.attributes, key)? {
            Value::IntValue(number) => Some(*number),
            _ => None,
        }
    }

    /// The trace's id in hexadecimal.
    pub fn trace_id(&self) -> String {
        hex(&self.span.trace_id)
    }

    /// The span's id in hexadecimal.
    pub fn span_id(&self) -> String {
        hex(&self.span.span_id)
    }

    /// The parent span's id in hexadecimal; empty on a root.
    pub fn parent_id(&self) -> String {
        hex(&self.span.parent_span_id)
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let attribute = attributes.iter().find(|attribute| attribute.key == key)?;
    attribute.value.as_ref()?.value.as_ref()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Collector(Spans);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for sent in request.into_inner().resource_spans {
            let resource = sent.resource.unwrap_or_default().attributes;
            for span in sent.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(ReceivedSpan {
                    resource: resource.clone(),
                    span,
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse {
            partial_success: None,
        }))
    }
}
