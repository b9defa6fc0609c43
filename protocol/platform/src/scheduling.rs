//! How the kernel schedules our threads.
//!
//! A token passes through several programs, and each wakes the next. A thread of the usual kind preempts the thread
//! that woke it, which had more to send, or wakes a sleeping processor, which in a virtual machine costs more than all
//! the work on a token. With `SCHED_BATCH` a thread has the same share of the processor, but does not preempt: it
//! handles everything that arrived meanwhile in one go. A model server that the worker starts is scheduled as usual.

#[cfg(target_os = "linux")]
use thread_priority::unix::NormalThreadSchedulePolicy;

/// Uses batch scheduling for this thread and for all threads and processes that it starts from now on. Best effort: if
/// the kernel refuses, or another policy or nice value is set, nothing changes.
pub fn use_batch_scheduling() {
    #[cfg(target_os = "linux")]
    linux::change(NormalThreadSchedulePolicy::Other, NormalThreadSchedulePolicy::Batch);
}

/// Restores the usual scheduling of this thread, before it becomes or starts another program.
pub fn be_usual() {
    #[cfg(target_os = "linux")]
    linux::change(NormalThreadSchedulePolicy::Batch, NormalThreadSchedulePolicy::Other);
}

#[cfg(target_os = "linux")]
mod linux {
    use thread_priority::unix::{
        NormalThreadSchedulePolicy, ThreadSchedulePolicy, set_thread_priority_and_policy, thread_native_id,
        thread_schedule_policy,
    };
    use thread_priority::{ThreadPriority, ThreadPriorityOsValue};
    use tracing::debug;

    pub(super) fn change(from: NormalThreadSchedulePolicy, to: NormalThreadSchedulePolicy) {
        // The library sets the nice value too.
        let is_nice = rustix::process::getpriority_process(None) != Ok(0);
        if is_nice || thread_schedule_policy().ok() != Some(ThreadSchedulePolicy::Normal(from)) {
            return;
        }
        let same_nice = ThreadPriority::Os(ThreadPriorityOsValue::default());
        if let Err(error) =
            set_thread_priority_and_policy(thread_native_id(), same_nice, ThreadSchedulePolicy::Normal(to))
        {
            debug!(%error, "cannot set the scheduling policy");
        }
    }
}
