//! Every bound of the wire and the default of every bound that a setting can change, each with its reason.

use std::time::Duration;

/// Largest payload of one binary piece: small enough that a control message never waits long behind one, large enough
/// that headers and system calls are negligible.
pub const MAX_PIECE_BYTES: usize = 65_536;

/// Largest WebSocket message the relay reads: an old worker sends the body of a whole response in one.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Largest text message of a `core1` peer, which contains no body.
pub const MAX_CONTROL_BYTES: usize = 1 << 20;

/// Largest encoded `request` that the published worker reads (its library's frame limit).
pub const MAX_OLD_WORKER_MESSAGE_BYTES: usize = 16 << 20;

/// Body bytes that each side may send per stream before it receives more credit, if the peer states no other window.
pub const STREAM_WINDOW_BYTES: u64 = 262_144;

/// Initial window of a response, as the relay states it: the memory that a client costs that stops reading. It grows
/// for fast readers; TCP itself begins with a fifth of it.
pub const ANSWER_WINDOW_BYTES: u64 = 65_536;

/// Largest number of outstanding bytes of one request body at the worker (256 KiB is 21 Mbit/s at 100 ms).
pub const WORKER_MAX_OUTSTANDING_BYTES: u64 = 4 << 20;

/// Largest number of unread bytes of one response (`MAX_UNREAD_BYTES`).
pub const MAX_UNREAD_BYTES: u64 = 4 << 20;

/// Largest request body (`MAX_REQUEST_BYTES`): the limit that Anthropic documents for Messages.
pub const MAX_REQUEST_BYTES: u64 = 32 << 20;

/// Largest streamed response (`MAX_STREAM_BYTES`).
pub const MAX_STREAM_BYTES: u64 = 1 << 30;

/// Memory budget of the relay: bytes of peers that it holds at once (`MAX_BUFFERED_BYTES`).
pub const MAX_BUFFERED_BYTES: u64 = 1 << 30;

/// Longest id on the wire.
pub const MAX_ID_BYTES: usize = 128;

/// Longest reason why a response ended, in bytes: the longest of a known backend, `model_context_window_exceeded`,
/// twice.
pub const MAX_FINISH_REASON_BYTES: usize = 64;

/// Finish reasons of one response: as many choices as a client is likely to request.
pub const MAX_FINISH_REASONS: usize = 16;

/// Longest worker name, in characters.
pub const MAX_WORKER_NAME_CHARS: usize = 128;

/// Longest zone or cluster, in bytes: as long as a label of Kubernetes.
pub const MAX_LABEL_BYTES: usize = 63;

/// Longest model name, in characters.
pub const MAX_MODEL_CHARS: usize = 256;

/// Models that one worker may advertise (`MAX_MODELS_PER_WORKER`). A multiplexer's aliases are counted like models, and
/// a name that several slots have is counted once.
pub const MAX_MODELS_PER_WORKER: usize = 256;

/// Largest value of `MAX_MODELS_PER_WORKER`.
pub const MAX_ADVERTISED_MODELS: usize = 4096;

/// Length of all model names of one worker together, in bytes: half of one message to a relay.
pub const MAX_ADVERTISED_NAME_BYTES: usize = 512 << 10;

/// Details of one model, in bytes of JSON: its limits and capabilities, several times as long as any server lists them.
pub const MAX_DETAILS_BYTES_PER_MODEL: usize = 4096;

/// Details of all models of one worker, in bytes. Details and names fit into one message.
pub const MAX_DETAILS_BYTES: usize = 256 << 10;

/// Slots of one multiplexer: as many as any machine has accelerators. The bound applies to the worker's file, to a
/// WorkerPool and to what a relay accepts.
pub const MAX_SLOTS_PER_WORKER: usize = 16;

/// Models of one slot.
pub const MAX_MODELS_PER_SLOT: usize = 64;

/// Aliases of one model of a slot.
pub const MAX_ALIASES_PER_MODEL: usize = 16;

/// Number of times that a request is requeued after its worker was lost.
pub const MAX_REQUEUES: u32 = 3;

/// Interval of heartbeats (`HEARTBEAT_INTERVAL`).
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);

/// A peer is lost after this number of silent heartbeat intervals.
pub const HEARTBEATS_UNTIL_LOST: u32 = 3;

/// Time limit from the upgrade to `register`.
pub const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);

/// Least time between two `demand` messages to one worker.
pub const DEMAND_INTERVAL: Duration = Duration::from_millis(50);

/// Least time between two `homes` messages to one relay.
pub const HOMES_INTERVAL: Duration = Duration::from_millis(250);

/// Conversations in one `homes` message: one message takes a relay less than a millisecond.
pub const MAX_HOMES_PER_MESSAGE: usize = 1024;

/// Unsent bytes that the kernel may buffer on a worker's or a client's socket: a cancel must not wait behind megabytes,
/// and a client that reads nothing must not appear to read fast.
pub const NOTSENT_LOWAT_BYTES: u32 = 128 << 10;

/// Relations that the reasons above require, whatever the numbers are.
const _: () = {
    let piece = MAX_PIECE_BYTES as u64;
    assert!(ANSWER_WINDOW_BYTES >= piece && STREAM_WINDOW_BYTES >= 2 * piece, "a stream stalls");
    assert!(NOTSENT_LOWAT_BYTES as u64 >= piece, "the socket of a stream stalls");
    assert!(MAX_UNREAD_BYTES > ANSWER_WINDOW_BYTES && WORKER_MAX_OUTSTANDING_BYTES > STREAM_WINDOW_BYTES);
    assert!(MAX_STREAM_BYTES > MAX_UNREAD_BYTES && MAX_BUFFERED_BYTES >= 16 * MAX_REQUEST_BYTES);
    // In JSON a byte of text may become two, and old workers have their bodies in there.
    assert!(
        MAX_MESSAGE_BYTES as u64 >= 2 * MAX_REQUEST_BYTES && MAX_REQUEST_BYTES >= MAX_OLD_WORKER_MESSAGE_BYTES as u64
    );
    assert!(MAX_OLD_WORKER_MESSAGE_BYTES > MAX_CONTROL_BYTES);
    // A key, the longest number, and the punctuation between them.
    assert!(MAX_CONTROL_BYTES > 2 * MAX_HOMES_PER_MESSAGE * 42, "a message of homes is too long");
    let models = MAX_MODELS_PER_SLOT * (1 + MAX_ALIASES_PER_MODEL) * (MAX_MODEL_CHARS + MAX_ID_BYTES);
    assert!(MAX_CONTROL_BYTES > models, "a slot's models do not fit into one message");
    assert!(
        MAX_CONTROL_BYTES > MAX_ADVERTISED_NAME_BYTES + MAX_DETAILS_BYTES
            && MAX_DETAILS_BYTES > MAX_DETAILS_BYTES_PER_MODEL
    );
};
