//! Every reason in a pool's conditions, with its meaning and what to do: the table that the code and the manual share.

macro_rules! reasons {
    ($($name:ident: $help:literal,)*) => {
        /// The reason of a WorkerPool's condition.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Reason {
            $(#[doc = $help] $name,)*
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the name in conditions and Events.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// Returns the meaning, and what to do.
            pub fn help(self) -> &'static str {
                match self { $(Self::$name => $help,)* }
            }
        }
    };
}

reasons! {
    Serving: "Workers of the pool are connected to the Provider's relays.",
    ScaledToZero: "The pool is scaled to zero, as configured; with `scaling`, a request for one of its models wakes it.",
    WaitingForWorkers: "Pods are being created or are loading, or their workers have not registered yet. If this persists, inspect the Pods with `kubectl describe` and the log of their container modelrelay-worker.",
    NotConnected: "Pods have been ready for half a minute, but none of their workers is connected to a relay. See the log of the container modelrelay-worker.",
    BackendsNotAnswering: "Pods have been ready for half a minute, or unready for ten minutes, and their workers are connected, but none advertises a model: the backends are still loading (a large model takes longer; the state then changes by itself), listen on another port than that of `spec.backend`, or serve no model of `spec.models`. See the logs of the backend and of the container modelrelay-worker.",
    NoPods: "No Pod in the namespace has the label modelrelay.io/pool with the pool's name. Set it on the Pod template of the backends. With `spec.selector`: no Pod that it matches was created since the pool, or the namespace lacks the label modelrelay.io/select-pods: enabled. If it is set, the Events of the Pods' controller show why it cannot create them.",
    PodsNotCreated: "The Deployment, the pool's or your own, cannot create its Pods; the message contains the error, for example a quota, a policy, or a rejection by the webhook.",
    PodsNotInjected: "Some labelled Pods have no worker: they were created while the webhook was unavailable or before it was installed. Delete them, so that their controller recreates them.",
    ProviderNotFound: "The Provider does not exist in the namespace. The pool starts when the Provider is created.",
    ProviderDisabled: "The Provider has `enabled: false`, so its relays reject workers.",
    RelaysUnknown: "The operator has not polled the Provider's relays yet. If this persists, check the Provider's conditions.",
    RelaysUnreachable: "None of the Provider's relays responds to the operator. Check the Provider's conditions.",
    RollingOut: "The Deployment or DaemonSet is replacing or adding Pods.",
    NameTaken: "An object with a name that the pool needs belongs to another owner. Rename or delete it, or create a pool with another name.",
    TargetNotFound: "The workload of `spec.scaling.targetRef` does not exist in the namespace. The pool scales it within ten seconds of its creation.",
    TemplateInvalid: "The template is invalid; the message names the field. The operator retries when the pool changes.",
    InvalidSpec: "The spec is invalid; the message names the field.",
    SlotsQuarantined: "The memory of a slot could not be freed, so the slot loads no model. Ready is False if this applies to all slots of the pool and no worker without slots serves. Another process holds the GPU, or a backend did not exit: `status.slots` names the workers, and their logs show the attempts. Free the memory and restart the Pod, or send the command `unload` with mode `now` through the relay's admin API.",
    ModelsUnknown: "The pool is scaled to zero, and its models are unknown, so no request can wake it. List them in `spec.models`, or set `spec.replicas` (with a `targetRef`, the replicas of the target) to 1 once: the models that its workers advertise are remembered.",
    ScalingConflict: "`spec.replicas` is changed externally while `spec.scaling` is set: by an HPA, KEDA, a user, or a manifest that is applied repeatedly. Use only one of the two. An external number is not lowered for one scaleDownDelay; after two within that time the operator stops scaling until one scaleDownDelay has passed without another, and for twice as long each time that another writer undoes the operator's number within a day. Or the pool's Deployment is scaled instead of the pool, and the message names the writer: set the scaleTargetRef of an HPA or KEDA to the WorkerPool. With a `targetRef`, the same applies to the replicas of the target, and the operator does not scale a Deployment whose replicas an HPA or KEDA last set: remove the autoscaler, and scale the Deployment once to another number. If an admission webhook changes the number that the operator writes, the message has both numbers.",
    Forbidden: "The API server does not permit the operator to write an object; the message names it. The chart's RBAC was changed (scaling needs `rbac.scaleDeployments`), or a policy or quota rejects the object. The operator retries.",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_accepted_by_api() {
        for reason in Reason::ALL {
            assert!(reason.as_str().chars().all(|c| c.is_ascii_alphanumeric()), "{reason:?}");
            assert!(!reason.help().is_empty());
        }
    }
}
