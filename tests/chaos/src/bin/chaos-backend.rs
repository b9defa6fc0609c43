//! The backend of the scenarios: its own process, so that it can be killed and stopped. `chaos-backend ADDRESS JOURNAL`

use std::{path::Path, sync::Arc, time::Duration};

use modelrelay_chaos::{
    executions::Journal,
    request::{RequestSpec, Stall, digest},
};
use modelrelay_harness::fake_backend::{Call, FakeBackend};

/// Longer than any scenario.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut args = std::env::args().skip(1);
    let mut arg = || args.next().expect("chaos-backend ADDRESS JOURNAL");
    let address = arg().parse().expect("an address to listen on");
    let journal = Arc::new(Journal::open(Path::new(&arg())));
    let mut backend = FakeBackend::start_at(address, &["m"]).await;
    backend.forget();
    #[expect(clippy::print_stdout, reason = "the parent process reads the address")]
    {
        println!("listening on {}", backend.url());
    }
    while let Some(call) = backend.call_within(FOR_EVER).await {
        tokio::spawn(serve(call, Arc::clone(&journal)));
    }
}

/// Responds to one request, piece by piece, as it specifies.
async fn serve(mut call: Call, journal: Arc<Journal>) -> Option<()> {
    let spec = RequestSpec::parse(&call.head.target)?;
    if spec.stall == Some(Stall::Upload) {
        return hang(call).await;
    }
    let body = call.try_read_body().await?;
    // A backend that resumed too late has no client left.
    if call.is_abandoned() {
        return None;
    }
    journal.begins(spec.nonce);
    if spec.stall == Some(Stall::Head) {
        return hang(call).await;
    }
    let pieces = spec.answer(digest(&body));
    let middle = pieces.len() / 2;
    // A plain response has its head when it has its first piece, as from every engine.
    if !spec.stream {
        pause(spec.gap_ms).await;
    }
    let kind = if spec.stream { "text/event-stream" } else { "application/json" };
    call.head(200, &[("content-type", kind), ("transfer-encoding", "chunked")]).await.then_some(())?;
    if spec.stall == Some(Stall::FirstByte) {
        return hang(call).await;
    }
    for (number, piece) in pieces.iter().enumerate() {
        if spec.stall == Some(Stall::Middle) && number == middle {
            return hang(call).await;
        }
        if spec.stream || number > 0 {
            pause(spec.gap_ms).await;
        }
        call.chunk(piece).await.then_some(())?;
    }
    if spec.stall == Some(Stall::End) {
        return hang(call).await;
    }
    call.end_stream().await;
    Some(())
}

/// Does nothing until the other side gives up.
async fn hang(mut call: Call) -> Option<()> {
    call.closes_within(FOR_EVER).await;
    None
}

#[expect(clippy::disallowed_methods, reason = "the pace of an engine, as requested")]
async fn pause(gap_ms: u64) {
    if gap_ms > 0 {
        tokio::time::sleep(Duration::from_millis(gap_ms)).await;
    }
}
