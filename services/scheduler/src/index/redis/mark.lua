-- Precedes each script that checks the checkpoint ("mark").
-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets

-- The numbers of flows (twice), of ended jobs, and of buckets.
local function counts()
  return redis.call('ZCARD', KEYS[2]) .. ' ' .. redis.call('HLEN', KEYS[3]) .. ' ' .. redis.call('ZCARD', KEYS[4])
    .. ' ' .. redis.call('SCARD', KEYS[5])
end

-- Removes the checkpoint of an inconsistent shard: a key was lost or changed from outside. The shard is then rebuilt.
local function without_mark()
  redis.call('HDEL', KEYS[1], 'offset', 'at')
  return {false, false}
end

-- The checkpoint, unless the stored counts differ from the actual ones.
local function mark()
  local found = redis.call('HMGET', KEYS[1], 'offset', 'at', 'counts')
  if found[1] and found[3] ~= counts() then
    return without_mark()
  end
  return {found[1], found[2]}
end

-- The stored numbers of jobs of the flows values[first], values[first + step], and so on; false for a flow without jobs.
local function sizes_of(values, first, step)
  local sizes = {}
  for start = first, #values, 4000 * step do
    local flows = {}
    for i = start, math.min(start + 3999 * step, #values), step do
      flows[#flows + 1] = values[i]
    end
    for _, size in ipairs(redis.call('HMGET', KEYS[3], unpack(flows))) do
      sizes[#sizes + 1] = size
    end
  end
  return sizes
end

