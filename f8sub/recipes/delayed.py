"""One scale a tensor, made of its amaxes of past steps: the recipe of a feature, under a recipe's name."""

from f8sub.features.delayed_recipe.delayed import RECIPE as RECIPE
from f8sub.features.delayed_recipe.delayed import DelayedScaling as DelayedScaling
from f8sub.features.delayed_recipe.delayed import recipe as recipe
