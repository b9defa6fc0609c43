//! The inference servers: one for each worker, all on one host.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::stream::{self, LocalBoxStream, StreamExt};
use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;
use turmoil::net::TcpListener;

use crate::answer;
use crate::determinism;
use crate::ledger::{Event, Ledger};
use crate::plan::{Plan, RequestPlan, Trouble};
use crate::router::Router;
use crate::secrets;

type Body = Either<Full<Bytes>, StreamBody<LocalBoxStream<'static, io::Result<Frame<Bytes>>>>>;

/// The port of the first worker's backend.
pub const FIRST_PORT: u16 = 9000;

/// The backend of one worker.
pub struct Backend {
    worker: usize,
    plan: Rc<Plan>,
    ledger: Ledger,
    is_up: watch::Receiver<bool>,
    executions: Cell<usize>,
    /// The number of running requests of each model.
    running: RefCell<BTreeMap<&'static str, usize>>,
    router: Option<RefCell<Router>>,
    reported: RefCell<Vec<String>>,
}

impl Backend {
    /// Creates the backend of this worker; it serves while `is_up`.
    pub fn new(worker: usize, plan: Rc<Plan>, ledger: Ledger, is_up: watch::Receiver<bool>) -> Rc<Self> {
        let own = &plan.workers[worker];
        let router = own.slot.clone().map(|slot| RefCell::new(Router::new(slot, &own.models)));
        Rc::new(Self {
            worker,
            router,
            plan,
            ledger,
            is_up,
            executions: Cell::new(0),
            running: RefCell::default(),
            reported: RefCell::default(),
        })
    }

    /// Serves indefinitely.
    pub async fn serve(self: Rc<Self>) -> io::Result<()> {
        let mut is_up = self.is_up.clone();
        loop {
            let _ = is_up.wait_for(|is_up| *is_up).await;
            let listener = TcpListener::bind(("0.0.0.0", FIRST_PORT + self.worker as u16)).await?;
            loop {
                let stream = tokio::select! {
                    accepted = listener.accept() => accepted?.0,
                    _ = is_up.wait_for(|is_up| !is_up) => break,
                };
                let backend = Rc::clone(&self);
                let mut down = self.is_up.clone();
                tokio::task::spawn_local(async move {
                    let service = service_fn(move |request| Rc::clone(&backend).answer(request));
                    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                    tokio::select! {
                        _ = connection => {}
                        _ = down.wait_for(|is_up| !is_up) => {}
                    }
                });
            }
        }
    }

    async fn answer(self: Rc<Self>, request: Request<Incoming>) -> Result<Response<Body>, io::Error> {
        self.look_for_secrets(&request);
        let path = request.uri().path().to_owned();
        if let Some(router) = &self.router
            && path.starts_with("/models")
        {
            return self.manage(router, &path, request.into_body()).await;
        }
        if request.method() == http::Method::GET {
            let models = &self.plan.workers[self.worker].models;
            let models: Vec<_> = models.iter().map(|id| json!({ "id": id, "object": "model" })).collect();
            return Ok(whole(200, json!({ "object": "list", "data": models }).to_string()));
        }
        let Ok(body) = request.into_body().collect().await.map(http_body_util::Collected::to_bytes) else {
            return Err(io::Error::other("the worker left"));
        };
        let Some(nonce) = answer::nonce_of(&body) else {
            self.wrong("received a corrupt request".to_owned());
            return Ok(whole(400, "{}".to_owned()));
        };
        let Some(plan) = self.plan.request(nonce) else {
            self.wrong(format!("there is no request {nonce}"));
            return Ok(whole(400, "{}".to_owned()));
        };
        if body != answer::prompt(plan) {
            self.wrong(format!("request {nonce} is corrupt"));
        }
        if !self.plan.workers[self.worker].models.contains(&plan.model) {
            self.wrong(format!("request {nonce} reached a worker that does not serve {}", plan.model));
        }
        if let Some(router) = &self.router
            && !router.borrow_mut().is_loaded(plan.model, determinism::elapsed())
        {
            self.wrong(format!("request {nonce} arrived while {} was not loaded", plan.model));
        }
        let execution = Execution::begin(&self, nonce, plan.model);
        sleep(plan.answer.thinks).await;
        match plan.answer.trouble {
            Trouble::Hangs => std::future::pending().await,
            Trouble::ClosesBeforeHead => Err(io::Error::other("as planned")),
            Trouble::Refuses => Ok(whole(500, answer::BACKEND_ERROR.to_owned())),
            Trouble::None | Trouble::ClosesMidway | Trouble::HangsMidway => Ok(begin(execution, plan)),
        }
    }

    /// Lists, loads and unloads models.
    async fn manage(&self, router: &RefCell<Router>, path: &str, body: Incoming) -> Result<Response<Body>, io::Error> {
        let now = determinism::elapsed();
        if path == "/models" {
            return Ok(whole(200, router.borrow_mut().list(now).to_string()));
        }
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let body: Value = serde_json::from_slice(&body).map_err(io::Error::other)?;
        let model = body["model"].as_str().unwrap_or_default();
        if path == "/models/load" {
            if let Err(wrong) = router.borrow_mut().load(model, now) {
                self.wrong(wrong);
            }
        } else {
            let running = self.running.borrow().get(model).copied().unwrap_or_default();
            if running > 0 {
                self.wrong(format!("{model} is unloaded under {running} requests"));
            }
            router.borrow_mut().unload(model);
        }
        Ok(whole(200, json!({ "success": true }).to_string()))
    }

    fn look_for_secrets(&self, request: &Request<Incoming>) {
        for (name, value) in request.headers() {
            let value = String::from_utf8_lossy(value.as_bytes());
            if secrets::NOT_FOR_BACKENDS.iter().any(|secret| value.contains(secret)) {
                self.wrong(format!("a backend received a secret in {name}"));
            }
        }
    }

    fn wrong(&self, what: String) {
        // A retry would report it again.
        if !self.reported.borrow().contains(&what) {
            self.reported.borrow_mut().push(what.clone());
            self.ledger.note(Event::Wrong(what));
        }
    }
}

/// Ends with its connection, like that of an inference server.
struct Execution {
    backend: Rc<Backend>,
    number: usize,
    model: &'static str,
}

impl Execution {
    fn begin(backend: &Rc<Backend>, nonce: usize, model: &'static str) -> Self {
        let number = backend.executions.get();
        backend.executions.set(number + 1);
        backend.ledger.note(Event::Began { nonce, worker: backend.worker, execution: number });
        *backend.running.borrow_mut().entry(model).or_default() += 1;
        Self { backend: Rc::clone(backend), number, model }
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        self.backend.running.borrow_mut().entry(self.model).and_modify(|running| *running -= 1);
        self.backend.ledger.note(Event::Finished { worker: self.backend.worker, execution: self.number });
    }
}

/// The response belongs to the connection, and ends with it.
fn begin(execution: Execution, plan: &RequestPlan) -> Response<Body> {
    let kind = if plan.answer.streams { "text/event-stream" } else { "application/json" };
    let pieces = answer::pieces(plan);
    let (trouble, pause) = (plan.answer.trouble, plan.answer.pause);
    let pieces = stream::unfold((0, execution), move |(index, execution)| {
        let piece = pieces.get(index).cloned();
        let is_last = index + 1 == pieces.len();
        async move {
            let piece = piece?;
            if index > 0 {
                sleep(pause).await;
            }
            let piece = match trouble {
                Trouble::ClosesMidway if is_last => Err(io::Error::other("as planned")),
                Trouble::HangsMidway if is_last => std::future::pending().await,
                _ => Ok(Frame::data(piece)),
            };
            Some((piece, (index + 1, execution)))
        }
    });
    let body = Either::Right(StreamBody::new(pieces.boxed_local()));
    Response::builder().header("content-type", kind).body(body).expect("a fixed head")
}

fn whole(status: u16, body: String) -> Response<Body> {
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(Either::Left(Full::new(Bytes::from(body)))).expect("a fixed head")
}
