//! The measurements as types: the figures of one turn.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::systems::System;

/// One kind of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// Median latency of plain responses, one request at a time; ms.
    AloneP50,
    /// Plain responses a second to 32 clients.
    Requests,
    /// Processor time of one of these requests; µs.
    CpuPerRequest,
    /// Median time to the first event of 32 paced streams; ms.
    FirstEventP50,
    /// 99th percentile of the same; ms.
    FirstEventP99,
    /// First events that came after 35 to 50 ms.
    Stalls,
    /// Processor time of one event of a paced stream; µs.
    CpuPerPacedChunk,
    /// The relay's part of it; µs.
    RelayCpuPerPacedChunk,
    /// Events a second of 32 unpaced streams.
    Chunks,
    /// Processor time of one of these events; µs.
    CpuPerChunk,
    /// Memory of one additional open stream; KiB.
    StreamKib,
    /// Processor time of a request with a prompt of 220 kB; µs.
    CpuPerLongPrompt,
    /// The same of 20 MB; ms.
    CpuPerHugePrompt,
    /// Processor time of a stream whose client disconnected after three events; µs.
    CpuPerAbort,
    /// Median time to the first event of 32 streams that begin at once, while each request is logged; ms.
    BurstP50,
    /// 99th percentile of the same; ms.
    BurstP99,
    /// 99th percentile of the same without a log; ms.
    BurstP99Unlogged,
    /// Processor time of a plain response to 32 clients while each request is logged; µs.
    CpuPerLoggedRequest,
    /// The relay's memory for an idle worker; KiB.
    IdleWorkerKib,
    /// The relay's processor time for an idle worker; percent of a core.
    IdleWorkerCpu,
    /// Mean processor time of dispatching one request among 10 workers; ns.
    DispatchFew,
    /// The same among 10,000 workers; ns.
    DispatchMany,
    /// 99th percentile of a dispatch while 10 requests of one model wait; ns.
    QueueShort,
    /// The same while 100,000 wait; ns.
    QueueLong,
    /// The same while 10 requests for 50 models in turn wait; ns.
    QueueShortModels,
    /// The same while 100,000 of these wait; ns.
    QueueLongModels,
    /// 99th percentile of a submission that waits, with 10 of one model waiting; ns.
    SubmitShort,
    /// With 100,000; ns.
    SubmitLong,
    /// With 10 of 50 models; ns.
    SubmitShortModels,
    /// With 100,000 of 50 models; ns.
    SubmitLongModels,
    /// 99th percentile of a cancellation, anywhere in the queue, with 10 of one model waiting; ns.
    CancelShort,
    /// With 100,000; ns.
    CancelLong,
    /// With 10 of 50 models; ns.
    CancelShortModels,
    /// With 100,000 of 50 models; ns.
    CancelLongModels,
    /// 99th percentile of an expiry, with 10 of one model waiting; ns.
    ExpireShort,
    /// With 100,000; ns.
    ExpireLong,
    /// With 10 of 50 models; ns.
    ExpireShortModels,
    /// With 100,000 of 50 models; ns.
    ExpireLongModels,
    /// Plain responses a second with one worker.
    Workers1,
    /// With two.
    Workers2,
    /// With four.
    Workers4,
    /// With eight.
    Workers8,
    /// Additional memory of relay and worker while a client does not read, after freed memory has been returned to the
    /// system; KiB.
    SlowClientKib,
    /// The peak before that; KiB.
    SlowClientPeakKib,
    /// 99th percentile of the gaps of its 99 neighbours, as a multiple of those without the slow client.
    SlowClientGaps,
    /// From the relay's start until it listens; ms.
    ColdStart,
    /// The relay's memory with nothing to do; MB.
    IdleRelayMb,
}

/// The figures of one system.
pub type Figures = BTreeMap<Figure, f64>;

/// One system's turn in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Turn {
    /// The system.
    pub system: System,
    /// The round, counted from 1.
    pub round: u32,
    /// The measurements.
    pub figures: Figures,
    /// Responses that were right in every byte.
    pub right: u64,
    /// Bytes that were compared.
    pub bytes: u64,
    /// The faults; the figures that they affected are missing.
    pub faults: Vec<String>,
}

/// A system that was not measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Absent {
    /// The system.
    pub system: System,
    /// The reason.
    pub reason: String,
}
