//! All drivers of the multiplexer in one table of tests, and tests of single kinds of backends.
//!
//! Real: llama-server alone and as a router, Ollama, the demo backend, shell commands. Fakes: vLLM, SGLang, and an API
//! server of Kubernetes. The drivers `process` and `vllm-sleep` with real vLLM are in `tests/plain`.

mod hooks;
mod kubernetes;
mod llama_router;
mod ollama;
mod process;
mod rig;
mod sglang;
mod table;
mod vllm;

/// Generates one module per driver, with every row of the table.
macro_rules! every_driver {
    ($($driver:ident),* $(,)?) => {
        $(mod $driver {
            every_driver!(@rows $driver: a_loaded_model_serves, loading_again_changes_nothing,
                an_unloaded_model_is_gone_and_unloading_again_is_no_error, what_was_never_loaded_can_be_unloaded,
                another_model_takes_the_place_and_the_first_comes_back, the_wrong_model_is_a_load_failure,
                a_model_that_nobody_configured_is_named, a_backend_that_cannot_be_reached_is_known_beforehand, a_dead_backend_is_noticed,
                a_forced_eviction_works_from_every_state, an_abandoned_load_leaves_nothing);
        })*
    };
    (@rows $driver:ident: $($row:ident),*) => {
        $(#[tokio::test]
        async fn $row() {
            if let Some(rig) = crate::rig::$driver().await {
                crate::table::$row(rig).await;
            }
        })*
    };
}

mod every {
    every_driver!(
        static_url,
        process,
        llama_router,
        ollama,
        vllm_started_by_us,
        vllm_started_by_others,
        vllm_at_level_two,
        sglang_started_by_us,
        sglang_started_by_others,
        hooks,
        kubernetes,
    );
}
