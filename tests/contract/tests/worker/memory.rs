//! A worker's memory for large request bodies, measured as its resident set size.

use std::time::Duration;

use modelrelay_harness::fake_backend::Call;
use modelrelay_harness::fake_relay::{Ack, RequestSpec};
use modelrelay_harness::usage::Usage;
use modelrelay_harness::worker_process::Rig;

const UPLOADS: u32 = 16;
const BODY_BYTES: usize = 16 << 20;

/// The number of bytes that a backend reads of a body before it hangs: enough for a window to grow to its maximum.
const READ_BYTES: usize = 8 << 20;

const QUIET: Duration = Duration::from_secs(1);

async fn read_and_hang(mut call: Call) -> Call {
    let mut read = 0;
    while read < READ_BYTES {
        read += call.read_some(65_536).await.expect("more of the body").len();
    }
    call
}

#[tokio::test]
async fn unread_uploads_stay_within_budget() {
    let mut rig = Rig::with(&Ack::core1(), UPLOADS + 1, |worker| worker.env("MAX_BUFFERED_BYTES", "4Mi")).await;
    let pid = rig.worker.process.pid().expect("it runs");
    let before = Usage::of(pid).resident_bytes;
    let body = vec![b'p'; BODY_BYTES];
    let mut hung = Vec::new();
    for _ in 0..UPLOADS {
        rig.link.send_request(&RequestSpec::chat("m").body(&body));
        hung.push(read_and_hang(rig.backend.call().await).await);
    }
    while rig.link.expect_within(QUIET, "credit").await.is_some() {}
    // 256 KiB for each, 4 MiB for all, and as much again for the allocator. With windows of 4 MiB it would be 64 MiB.
    let held = Usage::of(pid).resident_bytes.saturating_sub(before);
    assert!(held < 20 << 20, "{UPLOADS} unread uploads take {} KiB", held >> 10);
    rig.still_serves_with_leftovers().await;
}
