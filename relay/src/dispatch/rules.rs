//! The rules of the contract, one chapter per module.

pub(super) mod admission;
pub(super) mod choice;
pub(super) mod deadlines;
pub(super) mod demand;
pub(super) mod fair;
pub(super) mod gates;
pub(super) mod homes;
pub(super) mod lifecycle;
pub(super) mod membership;
pub(super) mod outliers;
pub(super) mod placing;
pub(super) mod positions;
pub(super) mod requeue;
pub(super) mod settle;
pub(super) mod silence;
