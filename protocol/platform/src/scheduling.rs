//! How the kernel schedules our threads.
//!
//! A token passes through several programs on its way, and each wakes the next. A thread of the usual kind takes the processor
//! from whoever wakes it, who had more to say, or wakes a processor that sleeps, which in a virtual machine costs more than all
//! the work on a token. As `SCHED_BATCH` it has the same share of the processor, and waits until its turn comes: what has come
//! meanwhile is done in one go. A model's server that the worker starts is scheduled as usual.

#[cfg(target_os = "linux")]
use thread_priority::unix::NormalThreadSchedulePolicy;

/// Has this thread, and all that it starts from now on, wait for its turn when it is woken. Best effort: where the kernel
/// refuses, or somebody chose another policy or nice value for us, everything stays as it is.
pub fn take_turns() {
    #[cfg(target_os = "linux")]
    linux::change(NormalThreadSchedulePolicy::Other, NormalThreadSchedulePolicy::Batch);
}

/// Has this thread scheduled as usual again, for a program that it is about to become or to start.
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
            debug!(%error, "the scheduling policy cannot be set");
        }
    }
}
