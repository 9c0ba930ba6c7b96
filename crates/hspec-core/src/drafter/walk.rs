//! Drawing a block's tokens from left to right.

use crate::{Result, TokenId};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use hspec_heads::CausalCorrection;

/// The slots of one block that predict a token.
pub(super) struct Slots<B: Backend> {
    /// Logits before any correction, `[1, k, v]`.
    pub(super) base: Tensor<B, 3>,
    /// After the final norm, `[1, k, h]`.
    pub(super) hidden: Tensor<B, 3>,
}

/// A slot's logits from those before the correction, the previous token and the hidden state: `[1, v]`, `[1]`
/// and `[1, h]` to `[1, v]`. Called for the slots in order.
pub(super) type Correct<'a, B> =
    Box<dyn FnMut(Tensor<B, 2>, Tensor<B, 1, Int>, Tensor<B, 2>) -> Tensor<B, 2> + 'a>;

/// Tokens as a tensor.
pub(super) fn ids<B: Backend>(tokens: &[TokenId], device: &B::Device) -> Tensor<B, 1, Int> {
    let ids: Vec<i64> = tokens.iter().map(|t| i64::from(t.0)).collect();
    Tensor::from_data(TensorData::new(ids, [tokens.len()]), device)
}

/// A tensor's values, without a copy where nothing else holds them.
pub(crate) fn host<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().convert::<f32>().into_vec().expect("just converted")
}

/// A correction that adds to the logits. `leading: [1, h]` is the hidden state of a slot before those that
/// predict, over which a recurrent one must be stepped.
pub(super) fn additive<'a, B: Backend, C: CausalCorrection<B>>(
    head: &'a C,
    anchor: TokenId,
    leading: Option<Tensor<B, 2>>,
    device: &B::Device,
) -> Correct<'a, B>
where
    C::State: 'a,
{
    let start = head.start(1, device);
    let mut state = Some(match leading {
        Some(hidden) => head.step(start, ids(&[anchor], device), hidden).1,
        None => start,
    });
    Box::new(move |base, previous, hidden| {
        let before = state.take().expect("put back by every step");
        let (bias, after) = head.step(before, previous, hidden);
        state = Some(after);
        base + bias
    })
}

/// The picked tokens. `pick` gets the number of the proposal, from 1, and its logits.
///
/// # Errors
/// What `pick` returns.
pub(super) fn walk<B: Backend>(
    slots: Slots<B>,
    anchor: TokenId,
    mut correct: Option<Correct<'_, B>>,
    pick: &mut dyn FnMut(usize, &[f32]) -> Result<TokenId>,
) -> Result<Vec<TokenId>> {
    let Slots { base, hidden } = slots;
    let ([_, k, v], h, device) = (base.dims(), hidden.dims()[2], base.device());
    let mut path = vec![anchor];
    match &mut correct {
        Some(correct) => {
            for t in 0..k {
                let row = |x: &Tensor<B, 3>, width| x.clone().narrow(1, t, 1).reshape([1, width]);
                let logits = correct(row(&base, v), ids(&path[t..], &device), row(&hidden, h));
                path.push(pick(t + 1, &host(logits))?);
            }
        }
        None => {
            for (t, logits) in host(base.reshape([k, v])).chunks_exact(v).enumerate() {
                path.push(pick(t + 1, logits)?);
            }
        }
    }
    Ok(path.split_off(1))
}
